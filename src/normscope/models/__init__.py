"""Models that people have, of the transformers library and our own, behind one ``ModelView``."""

from normscope.models.open import open_model
from normscope.models.view import NOTHING, AttentionStep, HeadProjections, ModelView, NormView, Observer, Sample

__all__ = ["NOTHING", "AttentionStep", "HeadProjections", "ModelView", "NormView", "Observer", "Sample", "open_model"]
