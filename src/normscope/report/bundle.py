"""JavaScript modules as one classic script, so that a page is a single file and works from disk without a build step.

A module has its imports first, one per line, ``import { a, b as c } from "./file.js";``, and exports declarations:
``export function``, ``export async function``, ``export class`` and ``export const``.
"""

import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

SCRIPTS = files("normscope.report")
_IMPORT = re.compile(r'import \{([\w\s,$]+)\} from "\./([\w.-]+\.js)";')
_EXPORT = re.compile(r"^export (?=(?:async function\*?|function\*?|class|const) ([\w$]+))", re.MULTILINE)
_UNKNOWN = re.compile(r"^\s*(?:import\b(?!\.)|export\b|\}\s*from\b).*", re.MULTILINE)


class BundleError(Exception):
    """A module that the bundler does not understand: a bug in one of our files, never a user's mistake."""


def bundle(entry: str, folders: Sequence[Traversable] = (SCRIPTS,), name: str = "") -> str:
    """The module ``entry`` and all that it imports, each in a function scope of its own, after what it imports.

    Args:
        entry: the file name of the first module.
        folders: where files are searched, in order.
        name: a global variable that gets the exports of ``entry``; none if empty.
    """
    scopes: dict[str, str] = {}
    _add(entry, folders, scopes, ())
    target = f"globalThis.{name} = " if name else ""
    script = "(() => {\n" + "".join(scopes.values()) + f"{target}{_scope(entry)};\n}})();\n"
    if "</script" in script.lower():
        raise BundleError(f"{entry}: a script of a page cannot contain the end of a script element")
    return script


def _add(file: str, folders: Sequence[Traversable], scopes: dict[str, str], importers: tuple[str, ...]) -> None:
    if file in importers:
        raise BundleError(f"modules import each other: {' → '.join((*importers, file))}")
    if file in scopes:
        return
    text = source(file, folders)
    head: list[str] = []
    for names, imported in _IMPORT.findall(text):
        _add(imported, folders, scopes, (*importers, file))
        wanted = [word.strip() for word in names.split(",") if word.strip()]
        exported = _EXPORT.findall(source(imported, folders))
        for word in wanted:
            if word.split(" as ")[0] not in exported:
                raise BundleError(f"{file}: {imported} does not export '{word}'")
        head.append(f"const {{ {', '.join(word.replace(' as ', ': ') for word in wanted)} }} = {_scope(imported)};\n")
    exports = _EXPORT.findall(text)
    body = _EXPORT.sub("", re.sub(rf"^{_IMPORT.pattern}\n", "", text, flags=re.MULTILINE))
    if unknown := _UNKNOWN.search(body):
        raise BundleError(f"{file}: '{unknown.group().strip()}' is no import or export that is bundled")
    ending = f"return {{ {', '.join(exports)} }};\n"
    scopes[file] = f'const {_scope(file)} = (() => {{\n"use strict";\n{"".join(head)}{body.rstrip()}\n{ending}}})();\n'


def source(file: str, folders: Sequence[Traversable]) -> str:
    """The text of a file in the first folder that has it."""
    for folder in folders:
        place = folder.joinpath(file)
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise BundleError(f"no file {file} in {', '.join(map(str, folders))}")


def _scope(file: str) -> str:
    """The variable that holds a module's exports."""
    return "$" + re.sub(r"\W", "_", file.removesuffix(".js"))
