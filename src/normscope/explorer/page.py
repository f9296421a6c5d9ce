"""The explorer's page: one self-contained HTML file, opened from disk or served."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from normscope import __version__
from normscope.explorer.ledger import ledger_data
from normscope.report.bundle import SCRIPTS, bundle, source
from normscope.report.page import compact
from normscope.report.theme import DARK, LIGHT, LINE_COLOURS, STEPS_ON_DARK, STEPS_ON_LIGHT, theme_css
from normscope.schemes import NAMED, scheme_values

FOLDERS = (files("normscope.explorer") / "web", SCRIPTS)  # where the page's files are, in order

GENERATOR = '<meta name="generator" content="normscope explore">'


def explorer_data(
    *,
    runs: Sequence[Mapping[str, Any]] = (),
    ledger: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    view: str = "lab",
) -> dict[str, Any]:
    """What the page knows when it is opened.

    Args:
        runs: run folders, each with ``id``, ``name``, ``kind`` and what its view shows.
        ledger: the statements and their verdicts; those of the packaged run if None.
        server: for a page that a server sends: ``token`` and what the server offers.
        view: the view that opens first: lab, atlas, training or ledger.
    """
    return {
        "version": __version__,
        "schemes": [scheme_values(scheme) for scheme in NAMED.values()],
        "ledger": ledger_data() if ledger is None else ledger,
        "runs": list(runs),
        "server": server,
        "view": view,
    }


def render_explorer(data: Mapping[str, Any]) -> str:
    """The whole page as HTML; ``data`` is what ``explorer_data`` returns."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    themes = {
        name: {**colours, "steps": steps, "series": [*LINE_COLOURS, colours["last"]]}
        for name, colours, steps in (("light", LIGHT, STEPS_ON_LIGHT), ("dark", DARK, STEPS_ON_DARK))
    }
    style = theme_css() + "".join(source(name, FOLDERS) for name in _style_sheets())
    script = bundle("app.js", FOLDERS)
    connect = "'self'" if data["server"] else "'none'"
    return environment.from_string(source("index.html.j2", FOLDERS)).render(
        generator=Markup(GENERATOR),
        policy=Markup(_policy(script, style, connect)),
        style=Markup(style),
        data=Markup(compact({**data, "themes": themes})),
        worker=Markup(bundle("worker.js", FOLDERS)),
        script=Markup(script),
    )


def content_policy(page: str) -> str:
    """The Content-Security-Policy that a rendered page carries, for the header of a server."""
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert found is not None
    return found.group(1)


def _policy(script: str, style: str, connect: str) -> str:
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src data: blob:; media-src blob:; worker-src blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    """What a policy calls the element with this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _style_sheets() -> list[str]:
    """The sheet of the frame, then those of views."""
    names = sorted(file.name for file in FOLDERS[0].iterdir() if file.name.endswith(".css"))
    return ["app.css", *(name for name in names if name != "app.css")]
