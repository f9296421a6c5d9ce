"""The sample that a model reads: a text, the bundled one unless another is given, or examples of its task."""

from importlib.resources import files

from normscope.errors import InputError
from normscope.models import Model, Sample
from normscope.models.model import TextOrIds
from normscope.models.normscope_model import NormscopeModel

SAMPLE_TOKENS = 512


def sample_text() -> str:
    """A story of some 500 words in plain English; its names, numbers and lists occur several times."""
    return files("normscope.measures").joinpath("sample.txt").read_text(encoding="utf-8")


def reads_text(model: Model) -> bool:
    """Whether the model reads texts; other models read examples of the task that they were trained on."""
    return not isinstance(model, NormscopeModel)


def chosen_sample(
    model: Model, text: TextOrIds | None, tokens: int | None, examples: int | None, seed: int, bundled: int | None = None
) -> Sample:
    """The first ``tokens`` of a text or of token ids, by default ``bundled`` of the bundled text; or ``examples`` of a task."""
    if not reads_text(model):
        if tokens is not None:
            raise InputError(f"'{model.name}' adds integers: it reads examples of its task, examples= instead of tokens=")
        return model.sample(text, examples, seed)
    if examples is not None:
        raise InputError(f"'{model.name}' reads a text: give text= or tokens= instead of examples=")
    if text is not None:
        return model.sample(text, tokens, seed)
    most = min(SAMPLE_TOKENS, model.context or SAMPLE_TOKENS)
    if tokens is not None and tokens > most:
        raise InputError(f"tokens={tokens}: '{model.name}' reads at most {most} of the bundled text; give another with text=")
    return model.sample(sample_text(), min(tokens or bundled or most, most), seed)
