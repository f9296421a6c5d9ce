"""The trainable transformer: any scheme, decoder or encoder-decoder, saved as safetensors and JSON."""

from normscope.transformer.calibration import calibrating
from normscope.transformer.config import TransformerConfig
from normscope.transformer.files import BUILTIN, SavedModel, load_model, save_model
from normscope.transformer.model import Row, Transformer

__all__ = ["BUILTIN", "Row", "SavedModel", "Transformer", "TransformerConfig", "calibrating", "load_model", "save_model"]
