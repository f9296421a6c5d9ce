"""The text that models read where none is given."""

from importlib.resources import files

SAMPLE_TOKENS = 512


def sample_text() -> str:
    """A story of some 500 words in plain English, with names, numbers and lists that come again."""
    return files("normscope.stability").joinpath("sample.txt").read_text(encoding="utf-8")
