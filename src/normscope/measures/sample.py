"""The sample that a model reads: a text, the bundled one unless another is given, pictures, or examples of its task."""

from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normscope.errors import InputError
from normscope.measures.pictures import sample_pictures
from normscope.models import Model, Sample
from normscope.models.model import TextOrIds

if TYPE_CHECKING:
    from PIL.Image import Image

SAMPLE_TOKENS = 512
_ROWS = 4  # of the default sound


def sample_text() -> str:
    """A story of some 500 words in plain English; its names, numbers and lists occur several times."""
    return files("normscope.measures").joinpath("sample.txt").read_text(encoding="utf-8")


def sample_sound(shape: tuple[int, ...]) -> Tensor:
    """Rising tones (rows, numbers) for a model of sound, or their ridges (rows, bins, frames) for one of spectrograms."""
    pitch, time = torch.arange(1.0, _ROWS + 1), torch.linspace(0, 1, shape[-1])
    if len(shape) == 1:
        return 0.5 * torch.sin(2 * torch.pi * pitch[:, None] * (200 + 300 * time) * time)
    height = torch.linspace(0, 1, shape[-2])[:, None]
    ridge = pitch[:, None, None] / (_ROWS + 1) * (0.5 + 0.5 * time)
    return (2 * torch.exp(-(((height - ridge) / 0.05) ** 2)) - 1).reshape(_ROWS, *shape)


def reads_text(model: Model) -> bool:
    """Whether the model reads texts; others read pictures or sound, or examples of the task that they were trained on."""
    return model.modality == "text" and not model.reads_examples


def chosen_sample(
    model: Model,
    text: TextOrIds | None,
    tokens: int | None,
    examples: int | None,
    seed: int,
    bundled: int | None = None,
    images: "Sequence[Image] | None" = None,
) -> Sample:
    """What a model reads: what is given, or what comes with normscope.

    Args:
        model: which reads it.
        text: a text or token ids.
        tokens: how many of them are read.
        examples: how many pictures, or examples of the model's task, are read.
        seed: of random choices.
        bundled: how many tokens of the bundled text are read.
        images: pictures.
    """
    if images is not None and model.modality != "image":
        raise InputError(f"'{model.name}' does not read pictures: images= is for models of pixels")
    if model.modality != "text":
        if text is not None or tokens is not None:
            what, instead = ("pictures", "; give images=") if model.modality == "image" else ("sound", "")
            raise InputError(f"'{model.name}' reads {what}: text=, token_ids= and tokens= are not for it{instead}")
        default = sample_pictures if model.modality == "image" else partial(sample_sound, model.feature_shape)
        return model.sample(default() if images is None else images, examples, seed)
    if not reads_text(model):
        if tokens is not None:
            raise InputError(f"'{model.name}' adds integers: it reads examples of its task, examples= instead of tokens=")
        if text is not None and examples is not None:
            raise InputError(f"examples={examples} draws examples of the task of '{model.name}': leave it out, or token_ids=")
        return model.sample(text, examples, seed)
    if examples is not None:
        raise InputError(f"'{model.name}' reads a text: give text= or tokens= instead of examples=")
    if text is not None:
        return model.sample(text, tokens, seed)
    most = min(SAMPLE_TOKENS, model.context or SAMPLE_TOKENS)
    if tokens is not None and tokens > most:
        raise InputError(f"tokens={tokens}: '{model.name}' reads at most {most} of the bundled text; give another with text=")
    return model.sample(sample_text(), min(tokens or bundled or most, most), seed)
