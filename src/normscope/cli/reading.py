"""What commands that look into a model share: which model, and what it reads."""

from pathlib import Path
from typing import Annotated

import typer

from normscope.errors import InputError

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
