"""What an experiment gives back, as declarations: findings, figures and sections, rendered by the report."""

from normscope.results.figures import Blocks, Chart, Cloud, Figure, HeatMap, Line, Panels, Point, Scene, Scenes, Trail
from normscope.results.findings import Finding
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
    "Scenes",
    "Section",
    "Trail",
]
