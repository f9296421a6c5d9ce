"""Queries: the tokens whose keys a word attends to most, head by head."""

from dataclasses import dataclass
from typing import ClassVar

from normscope.measures.head_probes import HeadProbe
from normscope.measures.probes import Returned, Rotations, nearest_keys
from normscope.measures.scores import Share
from normscope.measures.tokens import head_notes, position_notes, precedence_notes
from normscope.measures.vocabulary import Word, tokens_of
from normscope.models import Model


@dataclass(frozen=True)
class Queries(HeadProbe):
    """For a word x and all tokens y the scores q·k by head; ``distance`` is the number of positions between them."""

    name: ClassVar[str] = "queries"
    title: ClassVar[str] = "Queries and their keys"
    lead: ClassVar[str] = "The word is a query: these are the tokens whose keys it attends to most, head by head."
    word_first: ClassVar[bool] = False

    distance: int = 0

    def returned(
        self, model: Model, layer: int, words: list[Word], count: int, rotated: Rotations | None, progress: Share
    ) -> dict[str, Returned]:
        """The tokens with the largest q·k."""
        return {"heads": nearest_keys(model, layer, tokens_of(model, words), count, self.distance, rotated, progress)}

    def notes(self, model: Model) -> list[str]:
        """On head norms, positions and precedence."""
        return [*super().notes(model), *head_notes(model), *position_notes(model, self.distance), *precedence_notes(model)]
