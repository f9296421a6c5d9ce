"""Addition and subtraction of several integers, written as text."""

from normscope.training.tasks.addition.evaluation import Evaluation
from normscope.training.tasks.addition.examples import CHARACTERS, MASK, Addition, Examples, as_text, encode
from normscope.training.tasks.addition.feeds import split_rows
from normscope.training.tasks.addition.task import AdditionTask

__all__ = ["CHARACTERS", "MASK", "Addition", "AdditionTask", "Evaluation", "Examples", "as_text", "encode", "split_rows"]
