"""Experiments on a model: the model, the sample that it reads, and how both are opened."""

import hashlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import pandas as pd
from pydantic import AfterValidator, model_validator

from normscope.core.devices import chosen_device
from normscope.errors import InputError
from normscope.experiments.experiment import Outcome, Seeded
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Images, TextFile, TokenIds, ids_of, setting, text_of
from normscope.machine.memory import require_memory
from normscope.results.findings import Finding, most_important
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows

if TYPE_CHECKING:
    from PIL.Image import Image

    from normscope.measures.base import Measure, Subject
    from normscope.models import Model

ALWAYS = ("reading", "degenerate")  # the measures that are always taken: what the model reads, and what others leave out
_NO_ATTENTION = "no softmax attention is observed there"
_HEADING = 14  # characters in a line of a heading
MODEL_HELP = "A run folder, transformers folder, hub name, GGUF file, builtin:NAME or package:smollm2."


def as_model(value: Any) -> Any:
    """A name or path of a model, checked as far as that is possible without opening it; or a model in memory."""
    if isinstance(value, str | Path):
        from normscope.models.open import check_model

        check_model(value)
        return str(value)
    return as_source(value)


def as_source(value: Any) -> Any:
    """A name, a path or an object in memory: not the numbers and lists that a plan may hold."""
    if isinstance(value, bool | int | float | list | tuple | dict):
        raise InputError(f"a model is a name, a path or an object in memory, not {value!r}")
    return value


STREAM_HELP = "The residual stream to measure, of a model that has several: encoder, decoder, vision, text."
BLOCKS_HELP = "The list of residual blocks by its name in the model, such as transformer.h."
DTYPE_HELP = "Precision of the weights: bfloat16, float16, float32, or auto: as stored on a GPU, float32 on a CPU."
DEVICE_HELP = "cpu, cuda, disk (read the weights of every layer when it runs), or auto: a GPU if there is one."
BOS_HELP = "Whether texts begin with the BOS token."
TRUST_HELP = "Run code that comes with a transformers model. It can do everything that you can: only for authors you trust."
MODEL = Accepts("str | Path | Model | Module | SavedModel", complete="models")
ModelSource = Annotated[Any, AfterValidator(as_model), MODEL]
ModelDevice = Annotated[
    str,
    AfterValidator(lambda name: name if name == "disk" else chosen_device(name)),
    Accepts(complete=("auto", "cpu", "cuda", "disk")),
]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class WithModel(Seeded):
    """An experiment on a model."""

    model: ModelSource = setting(..., MODEL_HELP, argument=True)
    device: ModelDevice = setting("auto", DEVICE_HELP)
    dtype: Dtype = setting("auto", DTYPE_HELP)
    trust_remote_code: bool = setting(False, TRUST_HELP)
    stream: str | None = setting(None, STREAM_HELP, shown="the decoder, or the largest")
    blocks: str | None = setting(None, BLOCKS_HELP, shown="found in a forward pass")
    bos: bool | None = setting(None, BOS_HELP, shown="as the model's files state", option="--bos/--no-bos")

    @property
    def model_name(self) -> str:
        """What the model is called: the name or path that it is opened by, or that of the model in memory."""
        return self.model if isinstance(self.model, str) else str(getattr(self.model, "name", type(self.model).__name__))

    @property
    def record(self) -> dict[str, Any]:
        """The settings as plain values, with the model by its name."""
        return {**super().record, "model": self.model_name}

    @property
    def digests(self) -> dict[str, str | None]:
        """What is behind the names of inputs; None for what is not a file here."""
        from normscope.models.open import model_digest

        return {"model_digest": model_digest(self.model) if isinstance(self.model, str) else None}

    def fits(self, configuration: Mapping[str, Any]) -> bool:
        """Whether a run was of the inputs that are there now, not of others under the same names."""
        return all(configuration.get(name) == value for name, value in self.digests.items())

    def open(self, progress: Progress = SILENT) -> "Model":
        """The model, on the device of the experiment; a model in memory stays where it is."""
        from normscope.models import open_model

        advance = progress.stage(f"opening {self.model_name}", 1)
        device = self.device if isinstance(self.model, str) else None
        model = open_model(
            self.model,
            device,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            stream=self.stream,
            blocks=self.blocks,
        )
        advance(1)
        return model.with_bos(self.bos)


class OnModel(WithModel):
    """An experiment that runs a model on a text, or on examples of the model's task.

    Attributes:
        bundled_tokens: how many tokens of the bundled text are read by default; None for as many as the model takes, up to 512.
        copies: of a layer's hidden states, and of the embeddings, that its measures hold at a time.
    """

    bundled_tokens: ClassVar[int | None] = None
    copies: ClassVar[tuple[float, float]] = (90, 6)

    text: TextFile | None = setting(None, "A text to read.", shown="the bundled one")
    token_ids: TokenIds | None = setting(
        None, "A file of token ids to read instead of a text: numbers, a JSON list, or an .npy array.", shown="none"
    )
    tokens: int | None = setting(None, "Number of tokens to read.", shown="all of text=; up to 512 of the bundled text", ge=3)
    images: Images | None = setting(
        None, "An image file or a folder of images to read, for a model of pixels.", shown="the bundled pictures", several=True
    )
    examples: int | None = setting(
        None, "Number of examples to read, for a model that was trained to add; of pictures.", shown="256; all pictures", ge=2
    )

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        given = [name for name in ("text", "token_ids", "images") if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]}= and {given[1]}= exclude each other: give one of them")
        if self.bos is not None and self.token_ids is not None:
            raise InputError(f"bos={self.bos} has no meaning with token_ids= : they are read as they are")
        return self

    @property
    def content(self) -> str | list[list[int]] | None:
        """The text or the token ids that were given."""
        return text_of(self.text) if self.token_ids is None else ids_of(self.token_ids)

    @property
    def digests(self) -> dict[str, str | None]:
        """What is behind the names of the model and the text; None for what is not a file here."""
        content = self.content
        digest = None if content is None else hashlib.sha256(str(content).encode()).hexdigest()
        pixels = b"".join(str(image.size).encode() + image.tobytes() for image in self.pictures or ())
        return {
            **super().digests,
            "text_digest": digest,
            "images_digest": None if self.images is None else hashlib.sha256(pixels).hexdigest(),
        }

    @property
    def pictures(self) -> "list[Image] | None":
        """The pictures that were given."""
        from normscope.models.pictures import read_pictures

        return None if self.images is None else read_pictures(self.images)

    def subject(self, progress: Progress = SILENT) -> "Subject":
        """The model with its sample."""
        from normscope.measures.base import Subject
        from normscope.measures.sample import chosen_sample

        content = self.content
        model = self.open(progress)
        sample = chosen_sample(model, content, self.tokens, self.examples, self.seed, self.bundled_tokens, self.pictures)
        subject = Subject(model, sample, self.seed)
        require_memory(subject.memory(*self.copies), str(model.device))
        return subject

    def offered(self, subject: "Subject", measures: "Sequence[Measure]", chosen: bool, progress: Progress) -> "list[Measure]":
        """The measures that the model offers; it is an error if one that was ``chosen`` by name is missing, or all are."""
        reasons = {measure: measure.missing(subject) for measure in measures}
        offered = [measure for measure, reason in reasons.items() if not reason]
        for measure, reason in reasons.items():
            if reason and (chosen or not offered):
                raise InputError(f"'{self.model_name}' cannot be measured by {measure.name}, which {reason}")
            if reason:
                progress.message(f"{measure.name} is left out: it {reason}")
        return offered

    def measured_result(
        self,
        subject: "Subject",
        measures: "Sequence[Measure]",
        tables: dict[str, pd.DataFrame],
        settings: Mapping[str, Any],
    ) -> Result:
        """The result of measures of a subject: their tables, findings, and what ``run.json`` reports of both."""
        from normscope.measures.reading import reading_of
        from normscope.models.describe import view_text

        about = {**subject.about, **reading_of(tables)}
        cards = findings_of(measures, tables, about)
        found = pd.DataFrame([finding.record for finding in cards], columns=list(Finding("").record))
        read = {
            name: None if getattr(self, name) is None else str(getattr(self, name)) for name in ("text", "token_ids", "images")
        }
        return Result(
            type(self),
            {**about, **settings, **read, "bos": self.bos, **self.digests},
            {"findings": found, **tables},
            f"{view_text(subject.model)}; {about['tokens']:,} {about['reads']}; seed {self.seed}",
            self.seed,
            str(subject.model.device),
        )


def findings_of(measures: "Iterable[Measure]", tables: Mapping[str, pd.DataFrame], about: Mapping[str, Any]) -> list[Finding]:
    """The findings of all measures: cards first, the most important first, then those that are only listed."""
    findings = [finding for measure in measures for finding in measure.findings(tables, about)]
    cards = most_important(findings, len(findings))
    return [*cards, *(finding for finding in findings if finding not in cards)]


def measure_sections(measures: "Iterable[Measure]", result: Result) -> Iterator[Section]:
    """The section of every measure that has something to show, with its findings."""
    for measure in measures:
        section = measure.section(result.tables, result.summary)
        if section is not None:
            findings = tuple(measure.findings(result.tables, result.configuration))
            yield replace(section, findings=findings)


def skipped_table(
    model: "Model", reasons: "Mapping[Measure, str]", tables: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
    """The table ``skipped``: measures that the model does not offer, and layers that measures left out, with the reasons."""
    rows: list[dict[str, Any]] = [
        {"measure": measure.name, "layer": None, "reason": reason} for measure, reason in reasons.items() if reason
    ]
    without = [layer for layer in range(model.layers) if layer not in model.attention_layers]
    needing = [measure.name for measure, reason in reasons.items() if "attention" in measure.needs and not reason]
    rows += [{"measure": name, "layer": layer, "reason": _NO_ATTENTION} for name in needing for layer in without]
    rows += plain_rows(tables["skipped"]) if "skipped" in tables else []
    return {"skipped": pd.DataFrame(rows).astype({"layer": "Int64"})} if rows else {}


def not_measured(result: Result) -> Iterator[str]:
    """A sentence for every reason, with the measures that it concerns, in all layers or in some."""
    from normscope.models.describe import layers_named

    layers: dict[tuple[str, str], set[int]] = {}
    for row in plain_rows(result.tables["skipped"]) if "skipped" in result.tables else ():
        layers.setdefault((row["measure"], row["reason"]), set()).update({row["layer"]} - {None})
    measures: dict[tuple[str, str], list[str]] = {}
    for (measure, reason), some in layers.items():
        measures.setdefault((f" in {layers_named(some)}" if some else "", reason), []).append(measure)
    for (where, reason), names in measures.items():
        yield f"Not measured{where}: {', '.join(names)} ({reason})."


def measure_records(result: Result, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A record for every row of the named tables: its measure, layer and head, null for totals, and its other columns."""
    return [
        {"measure": measure, "layer": row.pop("layer", None), "head": row.pop("head", None), **row}
        for name, measure in names.items()
        for row in (plain_rows(result.tables[name]) if name in result.tables else ())
    ]


def named_measures(names: Iterable[str]) -> "list[Measure]":
    """Measures by their names, for what follows from their tables."""
    from normscope.measures import all_measures

    return [all_measures()[name]() for name in names]


def description(result: Result) -> str:
    """The model in a sentence, and what it read."""
    from normscope.measures.reading import reading_facts

    facts = "; ".join(f"{name}: {value}" for name, value in reading_facts(result.tables))
    return "\n".join(filter(None, (result.configuration["description"], facts))) + "\n"


def layer_table(measures: "Iterable[Measure]", result: Result, *, overview: bool = False) -> PageTable:
    """What measures report of every layer; the last row is the residual stream after the last layer.

    ``overview`` leaves out the columns that measures declare as details (``Measure.overview``).
    """
    columns = {
        heading: cells
        for measure in measures
        for heading, cells in list(measure.columns(result.tables).items())[: measure.overview if overview else None]
        if cells
    }
    depth = result.configuration["layers"]
    rows = tuple(
        (str(layer) if layer < depth else "output", *(cells.get(layer, "–") for cells in columns.values()))
        for layer in sorted({layer for cells in columns.values() for layer in cells})
    )
    return PageTable("", ("layer", *(textwrap.fill(heading, _HEADING) for heading in columns)), rows)


def measure_outcome(measures: "Iterable[Measure]", result: Result) -> Outcome:
    """The totals of all measures; with a note where some layers could not be measured."""
    from normscope.measures.degenerate import left_out
    from normscope.models.describe import layers_named

    layers = left_out(result.tables)
    note = f"{layers_named(layers)}: not measured, since states or attention are 0 or non-finite" if layers else None
    return Outcome({name: value for measure in measures for name, value in measure.totals(result.tables).items()}, note=note)
