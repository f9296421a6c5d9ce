"""A console for texts of others: what a terminal would obey, in a token or a file's name, is escaped."""

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from normscope.errors import visible

_WIDTH_OF_A_FILE = 160


class Terminal(Console):
    """Rich's console on a stream, without markup; it gives tables room where the output is a file or a pipe."""

    def __init__(self, stream: TextIO) -> None:
        width = None if stream.isatty() else _WIDTH_OF_A_FILE
        super().__init__(file=stream, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; only those of rich itself control the terminal."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
