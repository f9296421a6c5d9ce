"""All that can be drawn: each has a title, a caption and settings."""

from normscope.results.heat import HeatMap
from normscope.results.lines import Chart
from normscope.results.scene import Scene

Drawing = Chart | HeatMap | Scene
