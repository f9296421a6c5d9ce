"""What an experiment gives back, as declarations: findings, figures and sections, rendered by the report."""

from normscope.results.data import figure_data
from normscope.results.figures import Blocks, Chart, Cloud, Figure, HeatMap, Line, Panels, Point, Scene, Trail
from normscope.results.findings import Finding, most_important
from normscope.results.sections import PageTable, Section

__all__ = [
    "Blocks",
    "Chart",
    "Cloud",
    "Figure",
    "Finding",
    "HeatMap",
    "Line",
    "PageTable",
    "Panels",
    "Point",
    "Scene",
    "Section",
    "Trail",
    "figure_data",
    "most_important",
]
