"""A figure as a file: .png, .svg and .pdf without a browser, .html with one page around it, .csv and .json with its numbers."""

import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.errors import InputError, did_you_mean
from normscope.report.blocks import blocks_svg
from normscope.report.charts import WIDTH, draw, draw_panels
from normscope.report.sphere import scene_svg, scenes_svg
from normscope.report.theme import LIGHT, vega_config, wrapped
from normscope.results.data import figure_data
from normscope.results.figures import Blocks, Figure, Panels, Scene, Scenes

_SCALE = 2  # pixels of a PNG for each of the figure
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # ASCII, and as wide letters
_SUFFIXES = (".png", ".svg", ".pdf", ".html", ".csv", ".json")


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write the figure as the kind of file that the name asks for.

    Args:
        figure: any figure.
        path: ends in .png, .svg or .pdf (a picture), .html (an interactive page), .csv or .json (its numbers).
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in _SUFFIXES:
        hint = did_you_mean(suffix, _SUFFIXES)
        raise InputError(f"cannot draw to '{target}'; the name has to end in {', '.join(_SUFFIXES)}{hint}")
    if not target.parent.is_dir():
        raise InputError(f"cannot draw to '{target}': there is no folder '{target.parent}'")
    content = _content(figure, suffix)
    try:
        target.write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot draw to '{target}': {error.strerror or error}") from error
    return target


def _content(figure: Figure, suffix: str) -> bytes:
    import vl_convert

    if suffix == ".html":
        from normscope.report.page import render_page
        from normscope.results.sections import Section

        return render_page(figure.title, "", [Section(figure.title, figures={"figure": figure})]).encode()
    if suffix == ".csv":
        return (
            spreadsheet(figure_data(figure)).to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC).encode()
        )  # a text may end a line
    if suffix == ".json":
        return str(figure_data(figure).to_json(orient="records", force_ascii=False, double_precision=15)).encode()
    svg = figure_svg(figure)
    if suffix == ".svg":
        return svg.encode()
    return vl_convert.svg_to_png(svg, scale=_SCALE) if suffix == ".png" else vl_convert.svg_to_pdf(svg)


def spreadsheet(table: pd.DataFrame) -> pd.DataFrame:
    """The table with an apostrophe before every text that a spreadsheet would run as a formula; numbers stay numbers."""
    return table.rename(columns=_no_formula).map(_no_formula)


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def figure_svg(figure: Figure) -> str:
    """The static picture with title, caption and small print, on white."""
    if isinstance(figure, Blocks):
        return blocks_svg(figure.records)
    if isinstance(figure, Scene):
        return scene_svg(figure)
    if isinstance(figure, Scenes):
        return scenes_svg(figure)
    import vl_convert

    svg: str = vl_convert.vegalite_to_svg(static_spec(figure))
    ids = list(dict.fromkeys(re.findall(r'id="((?:gradient|clip)_?\d+)"', svg)))
    for place, name in enumerate(ids):  # Vega counts them through the process; a figure gives the same file every time
        svg = re.sub(rf"\b{name}\b", f"id-{place}", svg)
    return svg


def static_spec(figure: Figure) -> dict[str, Any]:
    """The Vega-Lite document of a chart, a heat map or panels, with their texts."""
    if isinstance(figure, Blocks | Scene | Scenes):
        raise InputError(f"'{figure.title}' is drawn as SVG and has no Vega-Lite document")
    drawn = draw_panels(figure) if isinstance(figure, Panels) else draw(figure)
    spec: dict[str, Any] = drawn.to_dict(validate=False)
    lines = [*wrapped(figure.caption, 12, WIDTH), *wrapped(figure.settings, 12, WIDTH)]
    spec["title"] = {"text": wrapped(figure.title, 15, WIDTH, bold=True), "subtitle": lines, "subtitleFontSize": 12}
    spec["config"] = vega_config(LIGHT)
    spec["padding"] = 12
    return spec
