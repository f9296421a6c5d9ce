"""Models that people have, of the ``transformers`` library and normscope's, behind one ``Model``."""

from normscope.models.capture import Captured
from normscope.models.model import BlockNorm, HeadProjections, Model
from normscope.models.observe import NOTHING, AttentionStep, Observer, Sample, Softmax, SublayerStep
from normscope.models.open import open_awake, open_model

__all__ = [
    "NOTHING",
    "AttentionStep",
    "BlockNorm",
    "Captured",
    "HeadProjections",
    "Model",
    "Observer",
    "Sample",
    "Softmax",
    "SublayerStep",
    "open_awake",
    "open_model",
]
