"""Figures and pages from results; this room draws what was computed elsewhere and computes nothing itself.

``charts`` draws line charts, heat maps and scenes in three dimensions, ``blocks`` the block of a scheme, ``page`` an HTML
page out of text, tables and pictures.
The libraries that draw are imported when something is drawn, so importing the room costs nothing.
"""

from normscope.report.blocks import draw_blocks, save_figure
from normscope.report.charts import Chart, Cloud, Line, Scene, Trail, save_chart
from normscope.report.page import PageTable, Picture, Section, render_page

__all__ = [
    "Chart",
    "Cloud",
    "Line",
    "PageTable",
    "Picture",
    "Scene",
    "Section",
    "Trail",
    "draw_blocks",
    "render_page",
    "save_chart",
    "save_figure",
]
