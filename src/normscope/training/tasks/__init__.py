"""Tasks: data that a model can be trained on, made on any device from a seed."""

from normscope.core.seeds import stream_seed
from normscope.training.tasks.addition import CHARACTERS, MASK, Addition, AdditionTask, Examples, as_text, encode

__all__ = ["CHARACTERS", "MASK", "Addition", "AdditionTask", "Examples", "as_text", "encode", "stream_seed"]
