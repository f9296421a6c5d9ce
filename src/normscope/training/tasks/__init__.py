"""Tasks: data that a model can be trained on, made on any device from a seed."""

from normscope.core.seeds import stream_seed
from normscope.training.tasks.addition import CHARACTERS, MASK, Addition, AdditionTask, Examples, as_text, encode, split_rows
from normscope.training.tasks.task import Report, Score, Task, Tested
from normscope.training.tasks.text import TextTask

TASKS: dict[str, type[Task]] = {"addition": AdditionTask, "text": TextTask}

__all__ = [
    "CHARACTERS",
    "MASK",
    "TASKS",
    "Addition",
    "AdditionTask",
    "Examples",
    "Report",
    "Score",
    "Task",
    "Tested",
    "TextTask",
    "as_text",
    "encode",
    "split_rows",
    "stream_seed",
]
