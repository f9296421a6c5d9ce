"""Text: the next token of documents that a user has, or of speeches that come with a package."""

from normscope.training.tasks.text.task import TextTask

__all__ = ["TextTask"]
