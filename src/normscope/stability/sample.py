"""What a model reads: a text, the one of the package where none is given, or examples of its task."""

from importlib.resources import files

from normscope.errors import InputError
from normscope.models import Model, Sample
from normscope.models.normscope_model import NormscopeModel

SAMPLE_TOKENS = 512


def sample_text() -> str:
    """A story of some 500 words in plain English, with names, numbers and lists that come again."""
    return files("normscope.stability").joinpath("sample.txt").read_text(encoding="utf-8")


def chosen_sample(
    view: Model, content: str | None, tokens: int | None, examples: int | None, seed: int, ours: int | None = None
) -> Sample:
    """What a model reads: some tokens of a text, by default ``ours`` of the package's own, or examples of its task."""
    if isinstance(view, NormscopeModel) and tokens is not None:
        raise InputError(f"'{view.name}' adds integers: it reads examples of its task (--examples), not tokens of a text")
    if not isinstance(view, NormscopeModel) and examples is not None:
        raise InputError(f"'{view.name}' reads a text (--text, --tokens), not examples of a task")
    if isinstance(view, NormscopeModel):
        return view.sample(content, examples, seed)
    if content is None:
        fits = min(SAMPLE_TOKENS, view.context or SAMPLE_TOKENS)
        if tokens is not None and tokens > fits:
            raise InputError(f"--tokens {tokens}: at most {fits} of our text fit '{view.name}'; give one of yours (--text)")
        return view.sample(sample_text(), min(tokens or ours or fits, fits), seed)
    return view.sample(content, tokens, seed)
