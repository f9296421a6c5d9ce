"""What the reports of all labs share: a chart saved into a run's folder, and the page that shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from normscope.errors import MissingExtraError
from normscope.report.charts import Drawing, save_chart
from normscope.report.page import PageTable, Picture, Section, render_page
from normscope.report.tables import table_of
from normscope.results import RunFolder

FIGURES = "figures"


def save_picture(run: RunFolder, name: str, chart: Drawing) -> Picture:
    """Draw the chart into the run's folder of figures; without plotly the picture has no interactive version."""
    folder = run.path / FIGURES
    try:
        save_chart(chart, folder, name)
    except MissingExtraError:
        return Picture(chart.title, folder / f"{name}.png", chart.caption, None, chart.settings)
    return Picture(chart.title, folder / f"{name}.png", chart.caption, f"{FIGURES}/{name}.html", chart.settings)


def charts_section(
    run: RunFolder,
    title: str,
    text: tuple[str, ...],
    charts: Mapping[str, Drawing | None],
    tables: Sequence[PageTable] = (),
) -> Section:
    """The text, the tables, and the charts that there are."""
    pictures = tuple(save_picture(run, name, chart) for name, chart in charts.items() if chart)
    return Section(title, text, tuple(tables), pictures)


def findings_section(run: RunFolder, settings: str) -> Section | None:
    """The sentences that a measurement came to, if the run has them."""
    table = table_of(run, "findings")
    return None if table is None else Section("Findings", tuple(map(str, table["text"])))


def write_page(run: RunFolder, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write ``report.html`` into the run's folder."""
    page = render_page(title, lead, sections, footer="The tables lie beside this page as Parquet files.")
    return run.write_text("report.html", page)
