"""What commands that look into a model share: which model, and what it reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.errors import InputError

if TYPE_CHECKING:
    from normscope.models import ModelView, Sample

ModelArgument = Annotated[
    str, typer.Argument(help="A run folder, transformers folder, hub name, GGUF file, builtin:NAME or package:smollm2.")
]
TextOption = Annotated[Path | None, typer.Option(help="A text to read.", show_default="one that comes with the package")]
ExamplesOption = Annotated[
    int | None, typer.Option(min=2, help="Examples to read, for a model that was trained to add.", show_default="256")
]


def read_text(path: Path | None) -> str | None:
    """The content of a text file; None if there is none to read."""
    if path is None:
        return None
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text '{path}': {getattr(error, 'strerror', None) or error}") from error


def chosen_sample(
    view: "ModelView", content: str | None, tokens: int | None, examples: int | None, seed: int, ours: int | None = None
) -> "Sample":
    """What a model reads: some tokens of a text, by default ``ours`` of the package's own, or examples of its task."""
    from normscope.models.own import OwnView
    from normscope.stability import SAMPLE_TOKENS, sample_text

    if isinstance(view, OwnView) and tokens is not None:
        raise InputError(f"'{view.name}' adds integers: it reads examples of its task (--examples), not tokens of a text")
    if not isinstance(view, OwnView) and examples is not None:
        raise InputError(f"'{view.name}' reads a text (--text, --tokens), not examples of a task")
    if isinstance(view, OwnView):
        return view.sample(content, examples, seed)
    if content is None:
        fits = min(SAMPLE_TOKENS, view.context or SAMPLE_TOKENS)
        return view.sample(sample_text(), min(tokens or ours or fits, fits), seed)
    return view.sample(content, tokens, seed)
