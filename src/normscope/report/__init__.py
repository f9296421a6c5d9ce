"""Figures and pages from results; this room draws what was computed elsewhere and computes nothing itself.

``charts`` draws line charts, heat maps and scenes in three dimensions, ``blocks`` the block of a scheme, ``page`` an HTML
page out of text, findings, tables and pictures, ``markdown`` the same as Markdown.
The libraries that draw are imported when something is drawn, so importing the room costs nothing.
"""

from normscope.report.blocks import draw_blocks, save_figure
from normscope.report.charts import Chart, Cloud, Line, Scene, Trail, save_chart
from normscope.report.markdown import render_markdown
from normscope.report.page import render_page
from normscope.results.sections import Finding, PageTable, Picture, Section

__all__ = [
    "Chart",
    "Cloud",
    "Finding",
    "Line",
    "PageTable",
    "Picture",
    "Scene",
    "Section",
    "Trail",
    "draw_blocks",
    "render_markdown",
    "render_page",
    "save_chart",
    "save_figure",
]
