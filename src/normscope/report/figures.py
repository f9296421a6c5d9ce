"""What the reports of all labs share: figures saved into a run's folder, its findings, and the page that shows them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from normscope.errors import InputError, MissingExtraError, did_you_mean
from normscope.report.blocks import draw_blocks, save_figure
from normscope.report.charts import Drawing, save_chart
from normscope.report.markdown import render_markdown
from normscope.report.page import render_page
from normscope.report.tables import table_of
from normscope.results.sections import Finding, PageTable, Picture, Section
from normscope.runs import RunFolder, plain_rows

FIGURES = "figures"
_RENDER: Mapping[str, Callable[[str, str, Sequence[Section], str, Path], str]] = {
    "html": render_page,
    "md": render_markdown,
}
FORMATS = tuple(_RENDER)


def save_picture(run: RunFolder, name: str, chart: Drawing) -> Picture:
    """Draw the chart into the run's folder of figures; without plotly the picture has no interactive version."""
    folder, interactive = run.path / FIGURES, True
    try:
        save_chart(chart, folder, name)
    except MissingExtraError:
        interactive = False
    page, data = f"{FIGURES}/{name}.html" if interactive else None, f"{FIGURES}/{name}.csv"
    return Picture(chart.title, folder / f"{name}.png", chart.caption, page, chart.settings, data)


def save_blocks(run: RunFolder, name: str, blocks: pd.DataFrame, title: str, caption: str, settings: str = "") -> Picture:
    """Draw the blocks of schemes, a row of the table for each sublayer, into the run's folder of figures."""
    folder = run.path / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [{str(key): value for key, value in row.items()} for row in blocks.to_dict("records")]
    save_figure(draw_blocks(records), folder / f"{name}.png")
    listed = [{key: "; ".join(value) if key == "branch" else value for key, value in record.items()} for record in records]
    pd.DataFrame(listed).to_csv(folder / f"{name}.csv", index=False)
    return Picture(title, folder / f"{name}.png", caption, None, settings, f"{FIGURES}/{name}.csv")


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


def findings_of(run: RunFolder) -> tuple[Finding, ...]:
    """The run's table ``findings``: its column ``text``, and in ``figure``, if it has one, the figure that shows each."""
    table = table_of(run, "findings")
    rows = [] if table is None else plain_rows(table.reindex(columns=["text", "figure"]))
    return tuple(Finding(row["text"], row["figure"]) for row in rows)


def with_findings(run: RunFolder, sections: Sequence[Section]) -> list[Section]:
    """The sections, and in front of them what was found, if the run says so."""
    found = findings_of(run)
    return [Section("Findings", (), findings=found), *sections] if found else list(sections)


def write_page(
    run: RunFolder, title: str, lead: str, sections: Sequence[Section], formats: Sequence[str] = ("html",), footer: str = ""
) -> list[Path]:
    """Write ``report.html``, ``report.md`` or both into the run's folder; the footer says where the tables are unless given."""
    for name in formats:
        if name not in FORMATS:
            raise InputError(f"unknown format '{name}'; allowed: {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}")
    footer = footer or "The tables lie beside this page as Parquet files."
    return [run.write_text(f"report.{name}", _RENDER[name](title, lead, sections, footer, run.path)) for name in formats]
