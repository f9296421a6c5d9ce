"""A self-contained HTML page from sections: findings, tables and interactive figures in one file that needs no network."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from normscope.machine.files import cache_folder
from normscope.report.blocks import blocks_svg
from normscope.report.bundle import bundle
from normscope.report.charts import draw
from normscope.report.files import figure_svg
from normscope.report.outline import Outline, Target
from normscope.report.sphere import scene_data
from normscope.report.theme import DARK, FONT, LIGHT, STEPS_ON_DARK, STEPS_ON_LIGHT, theme_css, vega_config
from normscope.results.figures import Blocks, Chart, HeatMap, Panels, Scene, Scenes
from normscope.results.findings import Finding, most_important
from normscope.results.sections import PageTable, Section

_LISTED = 5  # findings above the fold of a page without cards


def render_page(
    title: str,
    lead: str,
    sections: Sequence[Section],
    *,
    facts: Sequence[tuple[str, str]] = (),
    findings: Sequence[Finding] = (),
    footer: str = "",
    follow: Mapping[str, Any] | None = None,
) -> str:
    """The whole page as HTML; all texts are plain and escaped, all figures are inside.

    Args:
        title: the heading of the page.
        lead: a paragraph below it: what the model or the run is.
        sections: the parts, in order; their headings make the contents.
        facts: key figures, each a name and a value.
        findings: those of the whole result; the five that matter most are cards, the others are folded below them.
        footer: a line at the end.
        follow: for a page that is replaced while it is read: ``seconds`` until it loads itself again, or where it asks for
            ``news`` and its ``version``.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    outline, plots = Outline(sections), list[dict[str, Any]]()
    cards = most_important(findings)
    others = [_finding(finding, outline) for finding in findings if finding not in cards]
    shown = 0 if cards else _LISTED
    parts = [_part(section, index, outline, plots, lead) for index, section in enumerate(sections)]
    themes = {
        name: {"config": vega_config(colours, FONT), "colours": {**colours, "steps": steps}}
        for name, colours, steps in (("light", LIGHT, STEPS_ON_LIGHT), ("dark", DARK, STEPS_ON_DARK))
    }
    return environment.from_string(_file("page.html.j2")).render(
        title=title,
        lead=lead,
        facts=facts,
        cards=[_finding(finding, outline) for finding in cards],
        listed=others[:shown],
        folded=others[shown:],
        sections=parts,
        footer=footer,
        css=Markup(theme_css() + _file("page.css")),
        data=Markup(compact({**themes, "figures": plots, **({"follow": dict(follow)} if follow else {})})),
        vega=Markup(vega_script() if any("spec" in plot for plot in plots) else ""),
        script=Markup(bundle("page.js")),
        follow_script=Markup(_file("follow.js") if follow else ""),
    )


def compact(value: Any) -> str:
    """JSON for a script element, which it cannot end."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@cache
def vega_script() -> str:
    """Vega and Vega-Lite as one script; making it takes seconds, so it is cached."""
    import vl_convert

    folder = cache_folder()
    stored = folder / f"vega-{version('vl-convert-python')}.js"
    try:
        return stored.read_text(encoding="utf-8")
    except OSError:
        script = (
            "(() => {" + vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;") + "})();"
        )  # with names of its own scope
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".{stored.name}.*"):  # of a killed process; a living one does without the cache
            left.unlink()
        partial = folder / f".{stored.name}.{os.getpid()}"
        partial.write_text(script, encoding="utf-8")
        partial.replace(stored)
    except OSError:
        pass  # a machine without a cache makes it every time
    return script


def _file(name: str) -> str:
    return files("normscope.report").joinpath(name).read_text(encoding="utf-8")


def _finding(finding: Finding, outline: Outline) -> dict[str, Any]:
    return {**finding.record, "target": outline.target(finding)}


def _part(section: Section, index: int, outline: Outline, plots: list[dict[str, Any]], lead: str) -> dict[str, Any]:
    """What the template shows of a section; its interactive figures are appended to ``plots``."""
    tables: Sequence[PageTable] = section.tables
    return {
        "title": section.title,
        "anchor": outline.section(index),
        "text": section.text,
        "findings": [_finding(finding, outline) for finding in section.findings],
        "tables": tables,
        "figures": [_figure(target, plots, lead) for target in outline.figures(index)],
        "folded": section.folded,
    }


def _figure(target: Target, plots: list[dict[str, Any]], lead: str) -> dict[str, Any]:
    from markupsafe import Markup

    figure = target.figure
    shown: dict[str, Any] = {
        "anchor": target.anchor,
        "title": figure.title,
        "caption": figure.caption,
        "settings": "" if figure.settings == lead else figure.settings,
        "alt": ". ".join(text.rstrip(".") for text in (figure.title, figure.caption) if text) + ".",
        "plots": [],
        "columns": 1,
        "shape": "wide" if isinstance(figure, Panels | Scene | Scenes) else "",
        "kind": "plots",
    }
    if isinstance(figure, Blocks):
        return shown | {
            "kind": "blocks",
            "svg": Markup(blocks_svg(figure.records, in_page=True)),
            "shape": "wide" if len(figure.records) > 4 else "narrow",
        }
    if isinstance(figure, Scene | Scenes):
        scenes = figure.scenes if isinstance(figure, Scenes) else [figure]
        data = [scene_data(scene) for scene in scenes]
        plots += [
            {"name": target.name, "title": scene.title, "anchor": target.anchor, "data": d}
            for scene, d in zip(scenes, data, strict=True)
        ]
        legend = [(cloud["name"], cloud["colour"]) for cloud in data[0]["clouds"]]
        low, high = data[0]["steps"]
        order = (scenes[0].order, f"{low:g}", f"{high:g}") if data[0]["trails"] else None
        words = {"svg": Markup(figure_svg(figure)), "legend": legend, "order": order}
        texts = [(scene.title, scene.caption) if isinstance(figure, Scenes) else ("", "") for scene in scenes]
        places = [
            {"index": len(plots) - len(scenes) + i, "title": title, "caption": caption}
            for i, (title, caption) in enumerate(texts)
        ]
        return shown | words | {"kind": "scene", "plots": places, "columns": 3}
    inside = figure.figures if isinstance(figure, Panels) else [figure]
    titled = isinstance(figure, Panels)
    shown["plots"] = [_plot(panel, target, plots, titled) for panel in inside]
    shown["columns"] = figure.columns if isinstance(figure, Panels) else 1
    return shown


def _plot(figure: Chart | HeatMap, target: Target, plots: list[dict[str, Any]], titled: bool) -> dict[str, Any]:
    """The Vega-Lite document of a chart or heat map, and what the template shows of it."""
    spec: dict[str, Any] = draw(figure, interactive=True, width=300.0 if titled else 600.0).to_dict(validate=False)
    for key in ("$schema", "config"):
        spec.pop(key, None)
    cells = sum(map(len, figure.values)) if isinstance(figure, HeatMap) else 0
    plots.append({"name": target.name, "title": figure.title, "anchor": target.anchor, "spec": spec, "cells": cells})
    heads = isinstance(figure, HeatMap) and figure.heads
    return {
        "index": len(plots) - 1,
        "title": figure.title if titled else "",
        "height": round(spec["height"] + 40),
        "heads": heads,
    }
