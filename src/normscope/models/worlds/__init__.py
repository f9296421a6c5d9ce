"""Constructed models: embeddings that are sums of parts in known subspaces, so that theory gives every number."""

from normscope.models.worlds.circuit import KNOBS, InductionCircuit, breaking_points, theorem_7_margin
from normscope.models.worlds.world import Subspaces, World, head_scores, predicted_change, project_heads
from normscope.models.worlds.world_model import WorldModel

__all__ = [
    "KNOBS",
    "InductionCircuit",
    "Subspaces",
    "World",
    "WorldModel",
    "breaking_points",
    "head_scores",
    "predicted_change",
    "project_heads",
    "theorem_7_margin",
]
