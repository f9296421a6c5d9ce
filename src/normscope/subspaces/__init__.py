"""Which part of a token each head can see, and what the other parts do to it through a norm."""

from normscope.subspaces.circuit import InductionCircuit, breaking_points, theorem_7_margin
from normscope.subspaces.constructed import circuit_tables, interference_table, predicted_change
from normscope.subspaces.findings import findings, in_words, world_findings
from normscope.subspaces.measure import MEASURES, measure_subspaces
from normscope.subspaces.spaces import factors, principal_cosines, weighted_cosine
from normscope.subspaces.world_view import WorldView
from normscope.subspaces.worlds import Subspaces, World, head_scores, look

__all__ = [
    "MEASURES",
    "InductionCircuit",
    "Subspaces",
    "World",
    "WorldView",
    "breaking_points",
    "circuit_tables",
    "factors",
    "findings",
    "head_scores",
    "in_words",
    "interference_table",
    "look",
    "measure_subspaces",
    "predicted_change",
    "principal_cosines",
    "theorem_7_margin",
    "weighted_cosine",
    "world_findings",
]
