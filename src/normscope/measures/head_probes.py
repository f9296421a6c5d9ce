"""Measures that send words through single heads: nearest tokens, scores of heads over all words, and their figures."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd

from normscope.errors import InputError
from normscope.measures.base import Advance, Subject, Tables
from normscope.measures.probes import Returned, Rotations
from normscope.measures.scores import FEWEST, LABELS, NONE, Share, head_scores
from normscope.measures.tokens import TokenMeasure
from normscope.measures.vocabulary import Word, probe_words, texts_of
from normscope.models import Model
from normscope.results.figures import Chart, Figure, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import a_few, cell, floats, head_map, joined_tokens, table_of, token_name

_WORDS = 3  # of the common nouns, that tables of nearest tokens show; of named words all, up to a score's number
_HEADS = 20  # rows of a table of heads
_BESIDE = 0.25  # of the way to the next head
_SCORES = {
    "same": (
        "Heads that return the word itself",
        "share of words",
        "Bright heads return the word itself as the nearest token.",
    ),
    "nearness": (
        "Heads that return related tokens",
        "nearness",
        "Bright heads return tokens that mean something similar to the word; 0.5 is chance.",
    ),
    "precedence": (
        "Heads that return neighbours in text",
        "precedence",
        "Bright heads return tokens that are probable next to the word in text; 0.5 is chance.",
    ),
}
_LIMITS = (-0.03, 1.03)  # of scores, so that small differences look small
_HYPHEN = "‑"  # at which no line breaks
_COLUMNS = ["probe", "layer", "head", "word", "token", "rank", "nearest_token", "nearest_text", "score"]


@dataclass(frozen=True)
class HeadProbe(TokenMeasure):
    """Words through the heads of some layers.

    Attributes:
        layer: the layers, counted from 0 or, if negative, from the end; None for all.
        head: the heads that tables have; None for all.
        word: words that are one token each; None for the most common nouns.
        nearest: how many nearest tokens to return.
        scores: whether heads are scored over all words; None if there are enough words.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"vocabulary", "attention", "matrices"})
    asks: ClassVar[tuple[str, ...]] = ("seed",)
    passes: ClassVar[str] = "with scores, one for each of the returned tokens, of a few tokens each"
    lead: ClassVar[str]  # what the nearest tokens are
    word_first: ClassVar[bool]  # whether precedence is of returned tokens after the word

    layer: tuple[int, ...] | None = (0,)
    head: tuple[int, ...] | None = None
    word: tuple[str, ...] | None = None
    nearest: int = 5
    scores: bool | None = None

    @abstractmethod
    def returned(
        self, model: Model, layer: int, words: list[Word], count: int, rotated: Rotations | None, progress: Share
    ) -> dict[str, Returned]:
        """The nearest tokens of a layer's ``heads`` and, where it means something, of their ``sum``."""

    def measure(self, subject: Subject, advance: Advance = lambda done: None) -> Tables:
        """Tables ``nearest`` and, with scores, ``heads``."""
        model, chosen = subject.model, self.resolved(subject.model)
        words = probe_words(model, chosen.word)
        scored = len(words) >= FEWEST if self.scores is None else self.scores
        if scored and len(words) < FEWEST:
            raise InputError(
                f"scores=True needs at least {FEWEST} words, not {len(words)}; leave word= out for the common nouns"
            )
        tables: dict[str, list[pd.DataFrame]] = {}
        for number, layer in enumerate(chosen.layer or ()):

            def share_done(share: float, number: int = number) -> None:
                advance(number + share)

            for name, table in self.layer_tables(model, layer, words, scored, subject.seed, share_done).items():
                tables.setdefault(name, []).append(of_heads(table, chosen.head))
            advance(number + 1)
        return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}

    def layer_tables(self, model: Model, layer: int, words: list[Word], scored: bool, seed: int, progress: Share) -> Tables:
        """The tables of one layer; ``progress`` takes the share that is done."""
        first = 0.2 if scored else 1.0  # the share of the work that the heads themselves are
        returned = self.returned(model, layer, words, self.nearest, None, lambda share: progress(first * share))
        parts = [nearest_table(self.name, model, layer, words, each, name == "sum") for name, each in returned.items()]
        tables = {"nearest": pd.concat(parts, ignore_index=True)}
        if scored:

            def probe(count: int, rotated: Rotations | None, share: Share) -> Returned:
                return self.returned(model, layer, words, count, rotated, share)["heads"]

            scores = head_scores(
                model, layer, words, returned["heads"], probe, self.word_first, seed,
                lambda share: progress(first + (1 - first) * share),
            )  # fmt: skip
            tables["heads"] = scores.assign(probe=self.name)[["probe", *scores.columns]]
        return tables

    def findings(self, tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> Iterator[Finding]:
        """How many heads do more than random weights."""
        heads = table_of(tables, "heads")
        if heads is None:
            return
        clear = int((heads["label"] != NONE).sum())
        random = float(heads["same_random"].mean())
        yield Finding(
            f"{clear} of {len(heads)} heads return the word itself, related tokens or neighbours in text clearly more often "
            "than random weights with the same singular values.",
            f"heads-{self.name}-same",
            number=clear,
            comparison=(
                f"Heads return the word itself in {100 * heads['same'].mean():.1f} % of cases, "
                f"random weights in {100 * random:.1f} %."
            ),
        )

    def section(self, tables: Mapping[str, pd.DataFrame], settings: str) -> Section | None:
        """Scores of all heads beside those of random weights, and the nearest tokens of the first words."""
        heads, nearest = table_of(tables, "heads"), table_of(tables, "nearest")
        text, shown, figures = [self.lead], [], self.figures(tables, settings)
        if heads is not None:
            text.append(_ON_SCORES)
            shown = [_label_table(heads), _head_table(self.name, heads)]
            figures = {**_score_figures(self.name, heads, settings), **figures}
        if nearest is not None:
            shown += _nearest_tables(nearest)
        shown += self.further_tables(tables)
        return self.page(text, figures, shown)

    def further_tables(self, tables: Mapping[str, pd.DataFrame]) -> list[PageTable]:
        """Further tables for people."""
        return []

    def figures(self, tables: Mapping[str, pd.DataFrame], settings: str) -> dict[str, Figure | None]:
        """Further figures."""
        return {}


_ON_SCORES = (
    "Over all words: how often the nearest token is the word itself or a case variant (same), how much nearer in meaning the "
    "returned tokens are than those returned for other words (nearness), and how much more probable next to the word in text "
    "(precedence); the word itself counts in neither. 0.5 is chance for the last two. Random weights have the same singular "
    "values and other singular vectors."
)


def nearest_table(
    probe: str, model: Model, layer: int, words: list[Word], returned: Returned, summed: bool = False
) -> pd.DataFrame:
    """A row for every head, word and nearest token; the head is empty for the sum of all heads.

    Returns:
        Rows with probe, layer, head, word, token, rank, nearest_token, nearest_text, score.
    """
    heads, _, count = returned.tokens.shape
    texts = texts_of(model, returned.tokens)
    table = pd.MultiIndex.from_product(
        [range(heads), range(len(words)), range(1, count + 1)], names=["head", "number", "rank"]
    ).to_frame(index=False)
    tokens = returned.tokens.flatten().tolist()
    table = table.assign(
        probe=probe,
        layer=layer,
        word=[words[number].name for number in table["number"]],
        token=[words[number].token for number in table["number"]],
        nearest_token=tokens,
        nearest_text=[texts[token] for token in tokens],
        score=returned.scores.flatten().tolist(),
    )
    table["head"] = table["head"].astype("Int64").mask(table["head"] >= (0 if summed else heads))
    return table[_COLUMNS]


def of_heads(table: pd.DataFrame, heads: Sequence[int] | None) -> pd.DataFrame:
    """The rows of some heads, and of their sum."""
    return table if heads is None else table[table["head"].isna() | table["head"].isin(heads)]


def dots(name: str, x: list[float], table: pd.DataFrame, columns: tuple[str, str, str]) -> Line:
    """Dots with bars from a table's columns of values, lower and upper ends."""
    value, low, high = (floats(table[column]) for column in columns)
    return Line(name, x, value, low, high, dots=True)


def _score_figures(probe: str, heads: pd.DataFrame, settings: str) -> dict[str, Figure | None]:
    """For each score maps of the heads and of random weights; with one layer, both in one chart."""
    figures: dict[str, Figure | None] = {}
    for score in (score for score in _SCORES if heads[score].notna().any()):
        name = f"heads-{probe}-{score}"
        if heads["layer"].nunique() == 1:
            figures[name] = _score_chart(probe, score, heads, settings)
        else:
            title, label, caption = _SCORES[score]
            caption = f"{caption} Only what random weights, in the next figure, do not reach is specific to the head."
            figures[name] = head_map(
                heads, score, f"{title} ({probe})", label, caption, settings, limits=(0.0, 1.0), chosen=True
            )
            if heads[f"{score}_random"].notna().any():
                figures[f"{name}-random"] = head_map(
                    heads, f"{score}_random", f"{title} ({probe}, random weights)", label,
                    "The same for random weights with the same singular values: the baseline.",
                    settings, limits=(0.0, 1.0), chosen=True,
                )  # fmt: skip
    return figures


def _score_chart(probe: str, score: str, heads: pd.DataFrame, settings: str) -> Chart:
    """Dots with intervals for the heads of one layer, and beside them random weights."""
    title, label, _ = _SCORES[score]
    heads = heads.sort_values("head")
    places = floats(heads["head"])
    lines = [
        dots("head", places, heads, (score, f"{score}_low", f"{score}_high")),
        dots(
            "random weights", [place + _BESIDE for place in places], heads,
            (f"{score}_random", f"{score}_random_low", f"{score}_random_high"),
        ),
    ]  # fmt: skip
    if score != "same":
        lines.append(Line("chance", [places[0], places[-1] + _BESIDE], [0.5, 0.5]))
    caption = "A result is specific to the head if its bar, the confidence interval, is clearly above that of random weights."
    layer = int(heads["layer"].iloc[0])
    return Chart(f"{title} ({probe}, layer {layer})", "head", label, tuple(lines), caption, settings, limits=_LIMITS)


def _label_table(heads: pd.DataFrame) -> PageTable:
    counts = heads.groupby("label").size().to_dict()
    return PageTable("Number of heads of each kind", LABELS, (tuple(str(counts.get(label, 0)) for label in LABELS),))


def _head_table(probe: str, heads: pd.DataFrame) -> PageTable:
    """The heads, sorted by kind and then by score."""
    order = heads.assign(kind=[LABELS.index(label) for label in heads["label"]])
    order = order.sort_values(["kind", "same", "nearness"], ascending=[True, False, False], kind="stable").head(_HEADS)
    scores = [score for score in _SCORES if heads[score].notna().any()]
    cells = [[f"{layer}, {head}" for layer, head in zip(order["layer"], order["head"], strict=True)]]
    cells.append([str(label).replace("-", _HYPHEN) for label in order["label"]])
    for score in scores:
        cells += [_with_interval(order, score), [cell(value, ".2f") for value in floats(order[f"{score}_random"])]]
    columns = ("layer, head", "kind", *(name for score in scores for name in (score, "random")))
    cut = f"the first {len(order)} of {len(heads)}, all are in heads.parquet" if len(order) < len(heads) else "all"
    words = " to ".join(dict.fromkeys(str(int(count)) for count in (heads["words"].min(), heads["words"].max())))
    caption = f"Heads by their {probe}, sorted ({cut}), over {words} words; in brackets the confidence interval"
    return PageTable(caption, columns, tuple(zip(*cells, strict=True)))


def _with_interval(table: pd.DataFrame, score: str) -> list[str]:
    values = zip(*(floats(table[f"{score}{end}"]) for end in ("", "_low", "_high")), strict=True)
    return [f"{value:.2f} ({cell(low, '.2f')}–{cell(high, '.2f')})" if value == value else "–" for value, low, high in values]


def _nearest_tables(rows: pd.DataFrame) -> list[PageTable]:
    """A table for each of a few layers: a row for each head, a column for each of the first words."""
    words = list(dict.fromkeys(rows["word"]))
    cut = f"; {_WORDS} of {len(words)} words, all are in nearest.parquet" if len(words) >= FEWEST else ""
    words = words[:_WORDS] if cut else words
    tables = []
    for layer in a_few(sorted({int(layer) for layer in rows["layer"]})):
        here = rows[rows["layer"] == layer].sort_values("rank", kind="stable")
        heads = sorted({int(head) for head in here["head"].dropna()})
        groups = {f"head {head}": here[here["head"] == head] for head in heads}
        groups["all heads"] = here[here["head"].isna()]
        cells = tuple(
            (name, *(joined_tokens(group[group["word"] == word]["nearest_text"]) for word in words))
            for name, group in groups.items()
            if len(group)
        )
        caption = f"Nearest tokens in layer {layer}, nearest first{cut}"
        tables.append(PageTable(caption, ("head", *map(token_name, words)), cells))
    return tables
