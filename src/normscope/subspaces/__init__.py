"""Which part of a token each head can see, and what the other parts do to it through a norm."""

from normscope.subspaces.worlds import Subspaces, World, head_scores, look

__all__ = ["Subspaces", "World", "head_scores", "look"]
