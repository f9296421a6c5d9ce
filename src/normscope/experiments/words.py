"""words: Embeddings, what heads do to tokens, logit-lens trajectories.

Look into a model: normscope words package:smollm2 embeddings
"""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import BeforeValidator, model_validator

from normscope.errors import InputError, require_known
from normscope.experiments.experiment import Shown
from normscope.experiments.on_model import WithModel, measure_sections
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Names, TokenIds, as_list, ids_of, setting
from normscope.results.sections import Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from normscope.measures.tokens import TokenMeasure

ALL = "all"
_NEAREST = ("nearest_token", "nearest_text", "score")


def as_places(value: Any) -> Any:
    """Numbers from 0 or, if negative, from the end; or all."""
    if value is None or (isinstance(value, str) and value.strip().lower() == ALL):
        return None if value is None else ALL
    try:
        return tuple(int(item.replace("−", "-") if isinstance(item, str) else item) for item in as_list(value))
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"a number, several with commas such as 0,5,11, or all is needed, not '{value}'") from None


Places = Annotated[Any, BeforeValidator(as_places), Accepts("int | str | Sequence[int] | None")]


class Words(WithModel):
    """Embeddings, what heads do to tokens, logit-lens trajectories.

    Token embeddings on the sphere, queries, values and singular vectors of single heads, and the logit-lens trajectory of a
    token through the layers.

    Example:
        >>> import normscope as ns
        >>> run = ns.words("builtin:addition-small-pre", "queries", word="1,2,+", nearest=2, progress=False)
        >>> run.tables["nearest"][["head", "word", "nearest_text"]].shape
        (24, 3)
    """

    command: ClassVar[str] = "words"
    title: ClassVar[str] = "Tokens on the sphere"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope words package:smollm2 embeddings",
        "normscope words gpt2 queries --layer 0 --word time,life,world",
        "normscope words gpt2 values --layer 0,5,11",
        "normscope words gpt2 singular --layer 11 --matrix vo",
        'normscope words package:smollm2 journey "To kill two birds with one stone" --token -2',
        "normscope words package:smollm2 geometry --layer 0 --word time",
    )

    probe: str = setting(..., "embeddings, queries, values, singular, journey or geometry.", argument=True)
    text: str | None = setting(None, "journey: the text to read.", argument=True)
    token_ids: TokenIds | None = setting(
        None, "journey: a file of token ids to read instead of a text: numbers, a JSON list, or an .npy array.", shown="none"
    )
    layer: Places = setting(None, "Comma-separated layers; the first is 0, -1 the last; or all.", shown="0; singular: the last")
    head: Places = setting(None, "Show only these heads, comma-separated.", shown="all")
    word: Names | None = setting(
        None, "Comma-separated words to probe, each a single token.", shown="the 100 most common nouns"
    )
    nearest: int | None = setting(None, "Number of nearest tokens.", shown="5", ge=1, le=100)
    matrix: str | None = setting(None, "singular: vo for W_V W_O, qk for W_Q W_Kᵀ.", shown="vo")
    vectors: int | None = setting(None, "singular: number of vectors of each head.", shown="5", ge=1)
    distance: int | None = setting(None, "Positions between query and key, for rotary positions.", shown="0", ge=0)
    scores: bool | None = setting(
        None, "Score heads over all words, beside random weights.", shown="with 20 words or more", option="--scores/--no-scores"
    )
    token: int | None = setting(None, "journey: which token, from 0 or from the end.", shown="-2")
    map: str | None = setting(None, "journey: sphere, umap or pca.", shown="sphere")

    @model_validator(mode="after")
    def _consistent(self) -> "Words":
        from normscope.measures.maps import MAPS
        from normscope.measures.singular import MATRICES

        kinds = probes()
        require_known("probe", self.probe, kinds)
        for name in dict.fromkeys(name for kind in kinds.values() for name in uses(kind)):
            if getattr(self, name) is not None and name not in uses(kinds[self.probe]):
                users = ", ".join(other for other, kind in kinds.items() if name in uses(kind))
                what = f"'{self.text}'" if name == "text" else f"{name}="
                raise InputError(f"{what} has no meaning for {self.probe}; it belongs to {users}")
        for name, allowed in (("matrix", MATRICES), ("map", MAPS)):
            if getattr(self, name) is not None:
                require_known(name, getattr(self, name), allowed)
        if self.distance is not None and self.matrix is not None and self.matrix != "qk":
            raise InputError("distance= has a meaning for matrix=qk alone: values do not depend on positions")
        if self.token_ids is not None and self.text is not None:
            raise InputError("a text and token_ids= exclude each other: give one of them")
        if "text" in uses(kinds[self.probe]) and self.text is None and self.token_ids is None:
            raise InputError(f'{self.probe} needs a text, such as "To kill two birds with one stone"')
        return self

    @property
    def folder_name(self) -> str:
        """With the probe."""
        return f"{self.command}-{self.probe}"

    @property
    def measure(self) -> "TokenMeasure":
        """The probe with the settings that were given; its own defaults for the others."""
        kind = probes()[self.probe]
        given = {field.name: getattr(self, field.name) for field in fields(kind) if getattr(self, field.name) is not None}
        return kind(**{name: None if value == ALL else value for name, value in given.items()})

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """The tables of the probe, and notes on the model."""
        from normscope.measures.base import Subject

        model = self.open(progress)
        subject = Subject(model, _no_sample(), self.seed, self.text if self.token_ids is None else ids_of(self.token_ids))
        reason = self.measure.missing(subject)
        if reason:
            raise InputError(f"'{self.model_name}' cannot be measured by {self.probe}, which {reason}")
        measure = self.measure.resolved(model)
        layers = measure.settings.get("layer")
        advance = progress.stage(measure.title, model.layers if layers is None else len(layers))
        tables = measure.measure(subject, advance)
        chosen = {name: _plain(value) for name, value in measure.settings.items() if name != "word"}
        read = {"sentence": subject.sentence_text, **chosen, **measure.facts(subject, tables)}
        viewed = {"stream": model.stream} if len(model.streams) > 1 else {}
        configuration = {**self.record, **self.digests, **viewed, **read}
        notes = pd.DataFrame({"text": measure.notes(model)}, dtype="string")
        summary = _summary({"special": None, **configuration}, ("stream", *chosen, "word", "text", "special"))
        return Result(type(self), configuration, {"notes": notes, **tables}, summary, self.seed, self.device)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Notes on the model, and the probe's section with its findings."""
        if len(result.tables["notes"]):
            yield Section("What to know about this model", tuple(map(str, result.tables["notes"]["text"])), name="notes")
        yield from measure_sections([probes()[result.configuration["probe"]]()], result)

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The tables for people, the findings, and the notes on the model."""
        yield result.summary
        for section in result.sections:
            yield from section.tables
            for finding in section.findings:
                yield f"{finding.text} Compare: {finding.comparison}" if finding.comparison else finding.text
        yield from map(str, result.tables["notes"]["text"])

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """A record for every word, vector or state with its nearest tokens; then one for every score of a head."""
        tables = {name: table for name, table in result.tables.items() if name != "notes"}
        ranked = {name: tables[name].drop(columns="rank") for name in ("extremes", "singular", "nearest") if name in tables}
        rows = {name: plain_rows(table) for name, table in (tables | ranked).items()}
        chosen = result.configuration
        whose: dict[str, Any] = {"probe": chosen["probe"], "layer": None, "head": None, "word": None, "nearest": []}
        if "head_update" in rows:
            whose |= {name: chosen[name] for name in ("layer", "head", "word")}
            return [{**whose, "picture": name, **row} for name, points in rows.items() for row in points]
        if "journey" in rows:
            whose["word"] = chosen["word"]
            return _grouped(whose, rows["journey"], ("nearest_token", "nearest_text", "nearest_cosine"))
        norms = {(row["layer"], row["head"], row["word"]): row for row in rows.get("updates", ())}
        records = [whose | row for row in rows.get("distances", ())]
        records += _grouped(whose, rows.get("extremes", []), ("token", "text", "value"))
        records += _grouped(whose, rows.get("singular", []), _NEAREST)
        for record in _grouped(whose, rows.get("nearest", []), _NEAREST):
            records.append(record | norms.get((record["layer"], record["head"], record["word"]), {}))
        return records + [whose | row for row in rows.get("heads", ())]


def probes() -> "dict[str, type[TokenMeasure]]":
    """The probes by name."""
    from normscope.measures.embeddings import Embeddings
    from normscope.measures.geometry import Geometry
    from normscope.measures.journey import Journey
    from normscope.measures.queries import Queries
    from normscope.measures.singular import SingularVectors
    from normscope.measures.values import Values

    return {kind.name: kind for kind in (Embeddings, Queries, Values, SingularVectors, Journey, Geometry)}


def uses(kind: "type[TokenMeasure]") -> list[str]:
    """The settings of an experiment that mean something to a probe."""
    return [*(["text", "token_ids"] if "sentence" in kind.asks else []), *(field.name for field in fields(kind))]


def _no_sample() -> Any:
    """An empty sample: probes read single tokens, or a sentence of their own."""
    import torch

    from normscope.models import Sample

    return Sample.of(torch.zeros(0, 0, dtype=torch.long))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _summary(configuration: dict[str, Any], names: tuple[str, ...]) -> str:
    chosen = [f"{name} {configuration[name]}" for name in names if isinstance(configuration[name], str | int)]
    return "; ".join((configuration["model"], configuration["probe"], *chosen, f"seed {configuration['seed']}"))


def _grouped(whose: dict[str, Any], rows: list[dict[str, Any]], names: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Rows that differ only in their token as one record with a list of tokens."""
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        token = dict(zip(("token", "text", "score"), (row.pop(name) for name in names), strict=True))
        record = records.setdefault(tuple(row.values()), {**whose, **row, "nearest": []})
        record["nearest"].append(token)
    return list(records.values())
