"""Sections on the tokens of a language model: the sphere, the heads and the journeys, from their tables."""

from collections.abc import Sequence

import pandas as pd

from normscope.report.journey import journey_sections
from normscope.report.norm_pictures import norm_section
from normscope.report.probes import heads_section, nearest_sections
from normscope.report.singular import singular_section
from normscope.report.write import Report, tables_of, write_report
from normscope.results import PageTable, Section
from normscope.results.conventions import TOKEN_LENGTH
from normscope.results.tables import Tables, cell, floats, table_of, token_name
from normscope.runs import RunFolder

_SMALL = 0.0005  # would read as zero


def write_words_report(run: RunFolder, settings: str, formats: Sequence[str] = ("html",)) -> None:
    """Write the page on a model's tokens."""
    write_report(run.path, Report("Tokens on the sphere", settings, words_sections(tables_of(run), settings)), formats)


def words_sections(tables: Tables, settings: str) -> list[Section]:
    """Notes, journey, embeddings, heads, nearest tokens, singular vectors and norms, each if there is a table for it."""
    sections = [
        _notes(tables),
        *journey_sections(tables, settings),
        _embeddings(tables),
        heads_section(tables, settings),
        *nearest_sections(tables, settings),
        singular_section(tables, settings),
        norm_section(tables, settings),
    ]
    return [section for section in sections if section]


def _notes(tables: Tables) -> Section | None:
    table = table_of(tables, "notes")
    return None if table is None else Section("What to know about this model", tuple(map(str, table["text"])))


def _embeddings(tables: Tables) -> Section | None:
    distances, extremes = table_of(tables, "distances"), table_of(tables, "extremes")
    text, shown = [], []
    if distances is not None:
        text.append(
            "A norm without parameters moves every embedding onto one sphere. A small cosine distance means that it only "
            "rescales them, a small ℓ2 distance that they lie on the sphere already."
        )
        shown.append(_distance_table(distances))
    if extremes is not None:
        text.append(
            "The output always favours some tokens: those with a large embedding norm, and those that gain and bias single out."
        )
        shown.append(_extreme_table(extremes))
    return Section("Embeddings on the sphere", tuple(text), tuple(shown), name="embeddings") if shown else None


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
        (str(score), str(end), int(rank)): f"{token_name(text, TOKEN_LENGTH)} ({value:.3g})"
        for score, end, rank, text, value in zip(
            table["score"], table["end"], table["rank"], table["text"], floats(table["value"]), strict=True
        )
    }
    places = list(dict.fromkeys((end, rank) for _, end, rank in cells))
    rows = tuple((f"{end} {rank}", *(cells.get((score, end, rank), "–") for score in scores)) for end, rank in places)
    return PageTable("The most extreme tokens under each score, with its value", ("place", *scores), rows)
