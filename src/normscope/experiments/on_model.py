"""Experiments on a model: the model, the sample that it reads, and how both are opened."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator

from normscope.experiments.experiment import Seeded
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.settings import setting, text_of

if TYPE_CHECKING:
    from normscope.measures.base import Subject
    from normscope.models import Model

MODEL_HELP = "A run folder, transformers folder, hub name, GGUF file, builtin:NAME or package:smollm2."


def as_model(value: Any) -> Any:
    """A name or path of a model, checked as far as that is possible without opening it; or a model in memory."""
    if isinstance(value, str | Path):
        from normscope.models.open import check_model

        check_model(value)
        return str(value)
    return value


ModelSource = Annotated[Any, AfterValidator(as_model)]


class OnModel(Seeded):
    """An experiment that runs a model on a text, or on examples of the model's task.

    Attributes:
        bundled_tokens: how many tokens of the bundled text are read by default; None for as many as the model takes, up to 512.
    """

    bundled_tokens: ClassVar[int | None] = None

    model: ModelSource = setting(..., MODEL_HELP, argument=True)
    text: Path | None = setting(None, "A text to read.", shown="the bundled one")
    tokens: int | None = setting(None, "Number of tokens to read.", shown="all of --text; up to 512 of the bundled text", ge=3)
    examples: int | None = setting(None, "Number of examples to read, for a model that was trained to add.", shown="256", ge=2)

    @property
    def inputs(self) -> dict[str, Any]:
        """Digests of the model's files and of the text."""
        from normscope.models.open import model_digest

        content = text_of(self.text)
        return {
            "model_digest": model_digest(self.model) if isinstance(self.model, str) else None,
            "text_digest": None if content is None else hashlib.sha256(content.encode()).hexdigest(),
        }

    def open(self, progress: Progress = SILENT) -> "Model":
        """The model, on the device of the experiment."""
        from normscope.models import open_model

        progress(f"opening {getattr(self.model, 'name', self.model)}"[:60], 0, 1)
        return open_model(self.model, self.device)

    def subject(self, progress: Progress = SILENT) -> "Subject":
        """The model with its sample."""
        from normscope.measures.base import Subject
        from normscope.measures.sample import chosen_sample

        content = text_of(self.text)
        model = self.open(progress)
        sample = chosen_sample(model, content, self.tokens, self.examples, self.seed, self.bundled_tokens)
        return Subject(model, sample, self.seed)
