"""normscope: what normalization does to a transformer's geometry."""

from normscope.errors import InputError

__version__ = "0.1.0"
__all__ = ["InputError", "__version__"]
