"""explore: Explore schemes, models and runs in a browser.

Look into a model: normscope explore package:smollm2
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.command import translated
from normscope.cli.output import echo, examples, say
from normscope.cli.values import completing
from normscope.errors import InputError, MissingExtraError
from normscope.explorer import HOST, PORT
from normscope.machine.files import cache_folder, write_private

EXAMPLES = examples(
    "normscope explore                               (the sphere lab, with its tour)",
    "normscope explore package:smollm2               (type a prompt, turn the noise dial)",
    "normscope explore runs/audit runs/gpt           (what was measured, and a training while it runs)",
    "normscope explore --export tour.html            (one file to send to somebody)",
    "normscope explore runs/audit --export smollm2.html --overwrite",
)
_NEEDS = ("fastapi", "uvicorn")
_OPTIONS = {name: f"--{name}" for name in ("export", "overwrite", "host", "port", "token", "open")} | {"sources": ""}


def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders (of audits and watched trainings) and models, as audit takes them. Without any: the sphere lab, "
            "its tour and the ledger.",
            show_default=False,
            autocompletion=completing("runs,models"),
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write one self-contained HTML file, which works from disk without a network, and serve nothing.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the exported file if it exists.")] = False,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Any but the default lets other machines in; they need the token.")
    ] = HOST,
    port: Annotated[int, typer.Option(help="The port to listen at; 0 for any that is free.", min=0, max=65535)] = PORT,
    token: Annotated[
        str | None, typer.Option(help="The secret part of the address, of 16 characters or more.", show_default="random")
    ] = None,
    open: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open a browser.", show_default="open, where there is a screen")
    ] = None,
) -> None:
    """Explore schemes, models and runs in a browser.

    Four views: the sphere lab moves tokens under up to four schemes, whose slots you edit; the model atlas shows every head and
    token of a model or an audit; training follows a watched run; the ledger has every published claim with its verdict. The
    server runs until Ctrl-C and is reachable from this machine only. It needs the extra: pip install 'normscope[explorer]'.
    --export needs no extra.
    """
    try:
        if export is not None:
            from normscope.explorer.export import export_explorer

            if open:
                raise InputError("open=True is for a page that is served; export= writes a file and opens nothing")
            echo(f"{export_explorer(export, tuple(sources or ()), overwrite=overwrite)}\n")
        else:
            _serve(tuple(sources or ()), host, port, token, open)
    except InputError as error:
        raise type(error)(translated(str(error), _OPTIONS)) from error


def _serve(sources: tuple[str, ...], host: str, port: int, token: str | None, wanted: bool | None) -> None:
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"explore needs {' and '.join(missing)}: pip install 'normscope[explorer]'; export=tour.html does not"
        )
    from normscope.explorer.server import Settings, serve

    def ready(url: str, exposed: str) -> None:
        if exposed:
            say(f"normscope: WARNING: {translated(exposed, _OPTIONS)}")
        say(f"exploring at {url} (Ctrl-C stops)")
        _open(url, _has_screen() if wanted is None else wanted)

    serve(Settings(sources, host, port, token), ready)


def _has_screen() -> bool:
    """Whether a browser that is opened here is one that the user sees, and no text browser in the terminal."""
    here = sys.stderr.isatty() and "SSH_CONNECTION" not in os.environ
    return here and (sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()))


def _open(url: str, wanted: bool) -> None:
    import webbrowser

    if wanted and not webbrowser.open(_redirect(url)):
        say(f"no browser could be opened; open {url} in one")


def _redirect(url: str) -> str:
    """A page of this user alone that leads to the address: a browser's command line, which all users see, has no token."""
    place = cache_folder("explorer") / "open.html"
    try:
        write_private(place, f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">\n')
    except OSError:
        return url
    return place.as_uri()
