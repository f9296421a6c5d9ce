"""The bundled pictures: eight of 96×96 pixels, drawn by ``draw.py``, for models that read images."""

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from normscope.models.pictures import read_pictures

if TYPE_CHECKING:
    from PIL.Image import Image


def sample_pictures() -> "list[Image]":
    """A gradient, shapes, waves, a checkerboard, noise, letters, clouds and a landscape."""
    with as_file(files(__name__)) as folder:
        return read_pictures(folder)
