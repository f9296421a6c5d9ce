"""What the reports of all labs share: a chart saved into a run's folder, and the page that shows it."""

from collections.abc import Sequence
from pathlib import Path

from normscope.errors import MissingExtraError
from normscope.report.charts import Chart, HeatMap, save_chart
from normscope.report.page import Picture, Section, render_page
from normscope.results import RunFolder

FIGURES = "figures"


def save_picture(run: RunFolder, name: str, chart: Chart | HeatMap) -> Picture:
    """Draw the chart into the run's folder of figures; without plotly the picture has no interactive version."""
    folder = run.path / FIGURES
    try:
        save_chart(chart, folder, name)
    except MissingExtraError:
        return Picture(chart.title, folder / f"{name}.png", chart.caption, None, chart.settings)
    return Picture(chart.title, folder / f"{name}.png", chart.caption, f"{FIGURES}/{name}.html", chart.settings)


def write_page(run: RunFolder, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write ``report.html`` into the run's folder."""
    page = render_page(title, lead, sections, footer="The tables lie beside this page as Parquet files.")
    return run.write_text("report.html", page)
