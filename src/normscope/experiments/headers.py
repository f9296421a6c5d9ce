"""The catalog of commands: what the head of a file says of the command in it, read without importing the file."""

import os
from functools import cache
from typing import NamedTuple

_ROOT = os.path.dirname(os.path.dirname(__file__))


class Entry(NamedTuple):
    """A command in the catalog.

    Attributes:
        module: the module that defines it.
        summary: what it does, in one line.
        purpose: what people use it for; commands of one purpose are listed together.
        example: the command line that is used most.
    """

    module: str
    summary: str
    purpose: str
    example: str


@cache
def entries(package: str) -> dict[str, Entry]:
    """The commands in the files of a package by name.

    The docstring of such a file begins with ``NAME: SUMMARY``, where NAME is that of the file, and ends with
    ``PURPOSE: EXAMPLE``. Other files are no commands.
    """
    folder, catalog = os.path.join(_ROOT, package), {}
    for file in sorted(os.listdir(folder)):
        stem, ending = os.path.splitext(file)
        if ending == ".py":
            with open(os.path.join(folder, file), encoding="utf-8") as lines:
                name, _, summary = next(lines, "").strip().strip('"').partition(": ")
                if name == stem.replace("_", "-"):
                    purpose, _, example = (next(lines) + next(lines)).strip().partition(": ")
                    catalog[name] = Entry(f"normscope.{package}.{stem}", summary, purpose, example)
    return catalog
