"""Models that people have, of the transformers library and our own, behind one ``Model``."""

from normscope.models.open import open_model
from normscope.models.view import NOTHING, AttentionStep, BlockNorm, HeadProjections, Model, Observer, Sample

__all__ = ["NOTHING", "AttentionStep", "BlockNorm", "HeadProjections", "Model", "Observer", "Sample", "open_model"]
