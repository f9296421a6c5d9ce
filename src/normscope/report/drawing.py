"""All that can be drawn: each has a title, a caption and settings."""

from normscope.report.heat import HeatMap
from normscope.report.lines import Chart
from normscope.report.scene import Scene

Drawing = Chart | HeatMap | Scene
