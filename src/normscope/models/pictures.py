"""Pictures as a model reads them, and the names of the positions that they become."""

from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normscope.errors import InputError
from normscope.machine.files import image_files, read_image
from normscope.models.foreign import library_errors

if TYPE_CHECKING:
    from PIL.Image import Image

_ALLOWED = (
    "pixels are an image file, a folder of images, images of Pillow, arrays of bytes (height, width, 3), "
    "or floating-point numbers as the model reads them"
)
_MIDDLE = 0.5  # mean and standard deviation of pixels from 0 to 1, where a model states no others


def read_pictures(places: "str | Path | Sequence[str | Path]") -> "list[Image]":
    """The images of files and folders."""
    several = [places] if isinstance(places, str | Path) else places
    return [read_image(file) for place in several for file in image_files(place)]


def features_of(x: Any, shape: tuple[int, ...], processor: Any = None) -> Float[Tensor, "rows ..."]:
    """What a model reads of pictures.

    Args:
        x: image files or folders, images of Pillow or arrays of bytes, which are preprocessed; floating-point numbers are
            taken as they are, pictures or anything else that the model reads.
        shape: of the features of a row: (channels, height, width), (frames, channels, height, width), or (patches, numbers).
        processor: the image processor of the ``transformers`` library that belongs to the model; without one, pictures are
            resized to the size of ``shape``, and their pixels are from −1 to 1.
    """
    if (isinstance(x, Tensor) and x.is_floating_point()) or (isinstance(x, np.ndarray) and x.dtype.kind == "f"):
        numbers = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32)
        rows = numbers if numbers.ndim > len(shape) else numbers[None]
        if rows.ndim != len(shape) + 1 or not len(rows):
            raise InputError(
                f"the model reads numbers of the shape (rows, {', '.join(map(str, shape))}), not {list(numbers.shape)}"
            )
        return rows
    images = _images(x)
    if not images:
        raise InputError("there are no pictures to read")
    if len(shape) == 2:
        return _patches(images, shape)
    *frames, channels, height, width = shape
    if processor is None or frames:
        pixels = torch.stack([_pixels(image, channels, height, width) for image in images])
    else:
        with library_errors("the image processor of the model cannot read the pictures: "):
            pixels = torch.as_tensor(processor(images=images, return_tensors="pt")["pixel_values"])
    return pixels[:, None].expand(-1, *frames, -1, -1, -1).clone() if frames else pixels


def _images(x: Any) -> "list[Image]":
    """One picture or several as images of Pillow."""
    from PIL import Image

    if isinstance(x, Image.Image):
        return [x.convert("RGB")]
    if isinstance(x, str | Path):
        return read_pictures(x)
    if isinstance(x, Tensor | np.ndarray):
        array = np.asarray(x)
        if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[-1] != 3:
            raise InputError(f"{_ALLOWED}; not {array.dtype} of {list(array.shape)}")
        return [Image.fromarray(one) for one in (array if array.ndim == 4 else array[None])]
    if not isinstance(x, Sequence):
        raise InputError(f"{_ALLOWED}; not {type(x).__name__}")
    return [image for each in x for image in _images(each)]


def _pixels(image: "Image", channels: int, height: int, width: int) -> Float[Tensor, "channels height width"]:
    """A picture of a size, its pixels from −1 to 1."""
    from PIL import Image

    resized = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BICUBIC)
    numbers = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255).reshape(height, width, -1)
    if numbers.shape[-1] != channels:
        raise InputError(
            f"the model reads {channels} channels, and a picture has {numbers.shape[-1]}: give numbers as it reads them"
        )
    return (numbers.permute(2, 0, 1) - _MIDDLE) / _MIDDLE


def _patches(images: "Sequence[Image]", shape: tuple[int, ...]) -> Float[Tensor, "rows patches numbers"]:
    """Pictures as squares of patches, each the numbers of its pixels."""
    count, numbers = shape
    side, patch = isqrt(count), isqrt(numbers // 3)
    pixels = torch.stack([_pixels(image, 3, side * patch, side * patch) for image in images])
    cut = pixels.reshape(len(images), 3, side, patch, side, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(len(images), count, numbers)


def position_names(positions: Sequence[int], count: int, shape: tuple[int, ...]) -> list[str]:
    """``CLS`` and ``patch 3,4`` (row and column) for positions of the stream of a picture, ``frame 7`` for those of sound.

    Args:
        positions: their numbers.
        count: how many the stream has.
        shape: of the features, as in ``features_of``; patches make the largest grid with its aspect that fits.
    """
    if len(shape) < 2 or (len(shape) == 2 and isqrt(shape[0]) ** 2 != shape[0]):
        return [f"frame {position}" for position in positions]
    height, width = shape[-2:] if len(shape) > 2 else (1, 1)
    rows = isqrt(count * height // width)
    columns = rows * width // height
    first = count - rows * columns  # special tokens stand before the patches
    special = ["CLS", *(f"special {number}" for number in range(1, first))]
    return [
        special[p] if p < first else f"patch {(p - first) // columns},{(p - first) % columns}" if columns else f"position {p}"
        for p in positions
    ]
