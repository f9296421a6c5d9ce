"""The type checker that tests run the package under: beartype, with an int allowed where a float is expected."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
