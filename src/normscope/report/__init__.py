"""Pages and files from declared results; this package renders what was computed elsewhere and computes nothing itself.

``page`` renders sections as one interactive HTML file, ``markdown`` as Markdown, ``files`` a figure as PNG, SVG or CSV.
The libraries that draw are imported when something is drawn, so importing the package costs nothing.
"""

from normscope.report.files import save_figure
from normscope.report.markdown import render_markdown
from normscope.report.page import render_page
from normscope.report.write import write_report

__all__ = ["render_markdown", "render_page", "save_figure", "write_report"]
