"""Line charts, heat maps and scenes, once described, written three times: as PNG, as interactive HTML, and as CSV."""

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import InputError
from normscope.report.chart_html import draw_html, write_script
from normscope.report.chart_png import draw_png, words_of
from normscope.report.heat_html import draw_heat_html
from normscope.report.heat_png import draw_heat_png
from normscope.report.scene_html import draw_scene_html
from normscope.report.scene_png import draw_scene_png
from normscope.results.data import figure_data
from normscope.results.drawing import Drawing
from normscope.results.heat import HeatMap
from normscope.results.lines import Chart, Line
from normscope.results.scene import Cloud, Scene, Trail

if TYPE_CHECKING:
    import matplotlib.figure

__all__ = ["Chart", "Cloud", "Drawing", "HeatMap", "Line", "Scene", "Trail", "save_chart"]


def save_chart(chart: Drawing, folder: Path, name: str) -> tuple[Path, Path]:
    """Write ``NAME.png``, ``NAME.csv`` and ``NAME.html`` into the folder, and beside them the one script that such pages share.

    Without plotly the picture and its numbers are written all the same before the error says what is missing.

    Returns:
        The paths of the picture and of the page.
    """
    picture, page = folder / f"{name}.png", folder / f"{name}.html"
    figure = _figure(chart)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="png", metadata=words_of(chart))
        figure_data(chart).to_csv(folder / f"{name}.csv", index=False)
        page.write_text(_page(chart), encoding="utf-8")
        write_script(folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(f"cannot write the chart '{picture}': {error.strerror or error}") from error
    return picture, page


def _figure(chart: Drawing) -> "matplotlib.figure.Figure":
    if isinstance(chart, Chart):
        return draw_png(chart)
    return draw_heat_png(chart) if isinstance(chart, HeatMap) else draw_scene_png(chart)


def _page(chart: Drawing) -> str:
    if isinstance(chart, Chart):
        return draw_html(chart)
    return draw_heat_html(chart) if isinstance(chart, HeatMap) else draw_scene_html(chart)
