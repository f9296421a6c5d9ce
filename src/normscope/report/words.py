"""The page of words: the sphere, the heads and the journeys of a language model, from their tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.figures import charts_section, write_page
from normscope.report.journey import journey_sections
from normscope.report.norm_pictures import norm_section
from normscope.report.page import PageTable, Section
from normscope.report.probes import heads_section, nearest_sections
from normscope.report.singular import singular_section
from normscope.report.tables import cell, floats, table_of, token_name
from normscope.runs import RunFolder

_SMALL = 0.0005  # would read as zero
_LONGEST = 24  # characters of a token in a table


def write_words_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Draw the pictures of words and their page."""
    write_page(run, "Words on the sphere", settings, words_sections(run, settings), formats)


def words_sections(run: RunFolder, settings: str) -> list[Section]:
    """Notes, journey, embeddings, heads, nearest tokens, singular vectors and norms, each if the run has a table for it."""
    sections = [
        _notes(run, settings),
        *journey_sections(run, settings),
        _embeddings(run, settings),
        heads_section(run, settings),
        *nearest_sections(run, settings),
        singular_section(run, settings),
        norm_section(run, settings),
    ]
    return [section for section in sections if section]


def _notes(run: RunFolder, settings: str) -> Section | None:
    table = table_of(run, "notes")
    return None if table is None else Section("What to know about this model", tuple(map(str, table["text"])))


def _embeddings(run: RunFolder, settings: str) -> Section | None:
    distances, extremes = table_of(run, "distances"), table_of(run, "extremes")
    text, tables = [], []
    if distances is not None:
        text.append(
            "A norm without parameters moves every embedding onto one sphere. How far it moves them says what is on the sphere "
            "already: a small cosine distance means that it only changes lengths, a small ℓ2 distance that even these fit."
        )
        tables.append(_distance_table(distances))
    if extremes is not None:
        text.append(
            "The output favours some tokens always: those with a long embedding, and those that gain and bias single out."
        )
        tables.append(_extreme_table(extremes))
    return charts_section(run, "Embeddings on the sphere", tuple(text), {}, tables) if tables else None


def _distance_table(table: pd.DataFrame) -> PageTable:
    columns = [floats(table[name]) for name in ("l2_mean", "l2_std", "cosine_mean", "cosine_std")]
    rows = tuple(
        (str(setting), f"{_small(l2)} ± {_small(l2_std)}", f"{_small(cosine)} ± {_small(cosine_std)}")
        for setting, l2, l2_std, cosine, cosine_std in zip(table["setting"], *columns, strict=True)
    )
    caption = "From the normalised embeddings to the embeddings themselves, mean ± standard deviation over tokens"
    return PageTable(caption, ("embeddings", "ℓ2 distance", "cosine distance"), rows)


def _small(value: float) -> str:
    return "< 0.001" if 0 < abs(value) < _SMALL else cell(value)


def _extreme_table(table: pd.DataFrame) -> PageTable:
    scores = list(dict.fromkeys(map(str, table["score"])))
    cells = {
        (str(score), str(end), int(rank)): f"{token_name(text, _LONGEST)} ({value:.3g})"
        for score, end, rank, text, value in zip(
            table["score"], table["end"], table["rank"], table["text"], floats(table["value"]), strict=True
        )
    }
    places = list(dict.fromkeys((end, rank) for _, end, rank in cells))
    rows = tuple((f"{end} {rank}", *(cells.get((score, end, rank), "–") for score in scores)) for end, rank in places)
    return PageTable("The most extreme tokens under each score, with its value", ("place", *scores), rows)
