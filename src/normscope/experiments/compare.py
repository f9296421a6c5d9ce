"""compare: Compare models or runs side by side.

Many runs: normscope compare runs/audit runs/audit-2
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import BeforeValidator

from normscope.errors import InputError
from normscope.experiments import kind_of, summaries
from normscope.experiments.audit import Audit
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.on_model import MODEL, Dtype, ModelDevice, as_source
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result, load
from normscope.experiments.settings import Accepts, Images, TokenIds, as_list, setting
from normscope.machine.files import user_path
from normscope.measures import all_measures
from normscope.measures.base import LAYER, Quantity, quantities_of
from normscope.measures.degenerate import Degenerate, left_out
from normscope.measures.reading import Reading
from normscope.results.figures import Chart, HeatMap, Line
from normscope.results.findings import Finding
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, floats, plain_rows, spans_decades
from normscope.runs import has_segments, is_run, open_run, run_path
from normscope.watch.run_folder import WATCHED

if TYPE_CHECKING:
    from normscope.measures.base import Subject

Frame = pd.DataFrame
Row = dict[str, Any]
_NOTHING = 1e-6  # smaller values are rounding, and a ratio to them has no meaning


def measured_quantities() -> tuple[Quantity, ...]:
    """What measures declare: an audit has their tables."""
    return quantities_of(all_measures().values())


def all_quantities() -> tuple[Quantity, ...]:
    """Everything that can be compared: what measures and experiments declare."""
    return (*measured_quantities(), *(q for name in summaries() for q in kind_of(name).quantities))


def measured_tables() -> frozenset[str]:
    """The tables of measures that are compared."""
    return frozenset(quantity.table for quantity in measured_quantities())


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: how figures and tables call it.
        tables: its tables.
        tokens: how many tokens its model read, if that is known.
        audit: the audit of its model that is still to be made, with the opened model; None for a run without a model.
    """

    name: str
    tables: Mapping[str, Frame]
    tokens: int | None = None
    audit: "tuple[Audit, Subject] | None" = None

    @property
    def depth(self) -> int | None:
        """How many layers its tables have, if they have layers."""
        layered = {"degenerate", *(quantity.table for quantity in all_quantities() if quantity.x == LAYER)} & self.tables.keys()
        states = {quantity.table for quantity in all_quantities() if quantity.states}
        if left_out(self.tables):
            states.add("degenerate")  # the states after the last layer are among those that were left out
        last = {table: self.tables[table]["layer"].max() for table in layered}
        return max((int(layer) + (table not in states) for table, layer in last.items() if pd.notna(layer)), default=None)

    @property
    def table_names(self) -> list[str]:
        """The tables that it has, or will have."""
        return [*self.tables, *(measured_tables() if self.audit else ())]

    @property
    def title(self) -> str:
        """The name, and how many tokens were read."""
        return f"{self.name} ({self.tokens:,} tokens)" if self.tokens else self.name

    def measured(self, progress: Progress) -> "Side":
        """With the tables of the audit."""
        if self.audit is None:
            return self
        audit, subject = self.audit
        return replace(self, tables={**self.tables, **audit.measure(subject, progress).tables}, audit=None)


def _shared(name: str) -> Any:
    """A setting of ``Audit``, with the same help and limits."""
    return copy(Audit.model_fields[name])


class Compare(Seeded):
    """Compare models or runs side by side.

    Everything that two of them were measured by is put into one table and one figure each.
    Models are audited first (measures that are in the cache are not taken again); runs are read as they are, and the model of
    a training is audited too.

    Example:
        >>> import normscope as ns
        >>> a, b = (ns.simulate("pre,post", tokens=8, dim=8, time=2, seed=seed, progress=False) for seed in (0, 1))
        >>> list(ns.compare(a, b, progress=False).tables)
        ['findings', 'numbers', 'quantities', 'curves']
    """

    command: ClassVar[str] = "compare"
    title: ClassVar[str] = "Side by side"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope compare builtin:addition-small-pre builtin:addition-small-qkv",
        "normscope compare package:smollm2 gpt2 --text notes.txt --tokens 512",
        "normscope compare runs/train-tiny-pre runs/train-tiny-qkv     (their models, and how they learned)",
        "normscope compare runs/audit runs/audit-2",
        "normscope compare runs/advise runs/advise-2 --json",
    )
    variadic: ClassVar[str] = "subjects"

    subjects: Annotated[
        tuple[Any, ...],
        BeforeValidator(lambda value: _distinct(as_list(value))),
        Accepts(f"{MODEL.type} | Result", "runs,models"),
    ] = setting(
        help="Two or more: models (as for audit) or run folders of audit, train, evaluate, stability, subspaces, words "
        "(journey), ensemble, simulate or advise, or of watched trainings.",
        argument=True,
    )
    text: Path | None = _shared("text")
    token_ids: TokenIds | None = _shared("token_ids")
    images: Images | None = _shared("images")
    tokens: int | None = _shared("tokens")
    examples: int | None = _shared("examples")
    sentence: str | None = _shared("sentence")
    fresh: bool = _shared("fresh")
    bos: bool | None = _shared("bos")
    device: ModelDevice = _shared("device")
    dtype: Dtype = _shared("dtype")
    trust_remote_code: bool = _shared("trust_remote_code")

    @property
    def record(self) -> dict[str, Any]:
        """The settings as plain values, with the subjects by their names."""
        return {**super().record, "subjects": [_name_of(subject) for subject in self.subjects]}

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Open all subjects, refuse those with nothing in common, then audit the models and compare."""
        sides = self.sides(progress)
        check_common({side.name: side.table_names for side in sides})
        self._check_read(sides)
        audited = any(side.audit for side in sides)
        tables = compare_sides([side.measured(progress) for side in sides])
        summary = ", ".join(side.title for side in sides) + (f"; seed {self.seed}" if audited else "")
        return Result(type(self), self.record, tables, summary, self.seed, self.device)

    def sides(self, progress: Progress = SILENT) -> list[Side]:
        """The subjects, opened: tables of runs, and models with their samples."""
        return [
            self._side(subject, name, progress) for subject, name in zip(self.subjects, short_names(self.subjects), strict=True)
        ]

    def _side(self, subject: Any, name: str, progress: Progress) -> Side:
        result = load(subject) if isinstance(subject, str | Path) and is_run(subject) else subject
        if not isinstance(result, Result):
            return self._audited(subject, name, {}, progress)
        tables = {**_watched(result.path), **result.tables}
        if "model" in result.objects or (result.path is not None and (result.path / "config.json").is_file()):
            return self._audited(result.model if result.path is None else str(result.path), name, tables, progress)
        reads = any(table in measured_tables() for table in result.tables)  # the tokens of a simulation are not read
        return Side(name, tables, result.configuration.get("tokens") if reads else None)

    def _audited(self, model: Any, name: str, tables: Mapping[str, Frame], progress: Progress) -> Side:
        shared = Audit.model_fields.keys() & type(self).model_fields.keys()
        audit = Audit(model=model, **{field: getattr(self, field) for field in shared})
        subject = audit.subject(progress)
        return Side(name, tables, subject.about["tokens"], (audit, subject))

    def _check_read(self, sides: Sequence[Side]) -> None:
        """Refuse settings of what to read where no model reads it."""
        subjects = [side.audit[1] for side in sides if side.audit]
        for name in ("text", "token_ids", "images", "tokens", "examples", "sentence", "bos"):
            read = any(subject.sentence for subject in subjects) if name == "sentence" else bool(subjects)
            if getattr(self, name) is not None and not read:
                raise InputError(f"{name}= is not used: no model among these reads it, and runs are compared as they are")

    @classmethod
    def facts(cls, result: Result) -> list[tuple[str, str]]:
        """The full names of subjects that the page calls by a short one."""
        names = result.configuration["subjects"]
        return [(short, name) for short, name in zip(short_names(names), names, strict=True) if short != name]

    @classmethod
    def records(cls, result: Result) -> list[Row]:
        """The numbers."""
        return plain_rows(result.tables["numbers"])

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """The numbers, a column for each subject, and how far apart they are."""
        yield from _number_tables(result.tables["numbers"])
        yield from (f"- {finding.text}" for finding in result.findings)

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The numbers as a table with a column for each subject, and a figure for each quantity."""
        curves, figures = result.tables["curves"], {}
        for words in plain_rows(result.tables["quantities"]):
            rows = curves[curves["quantity"] == words["name"]]
            drawn = _map if rows["x"].isna().all() else _chart
            figures[words["name"]] = drawn(rows, words, result.summary)
        findings = tuple(Finding.of(row) for row in plain_rows(result.tables["findings"]))
        yield Section("Numbers", (), tuple(_number_tables(result.tables["numbers"])), findings=findings)
        yield Section("Figures", figures=figures)


def compare_sides(sides: Sequence[Side]) -> dict[str, Frame]:
    """All quantities that two sides or more were measured by; layers as shares of the depth where depths differ.

    Returns:
        ``curves`` (subject, quantity, line, x, y), ``numbers`` (quantity, line, number, unit, subject, value), ``quantities``
        (name, title, x, y, caption: of the figures), ``findings``.
    """
    depths = {side.depth for side in sides} - {None}
    numbers, curves, quantities = _token_rows(sides), [], []
    partial = {side.name for side in sides if left_out(side.tables)}
    findings: list[Finding] = []
    for quantity in all_quantities():
        share = quantity.x == LAYER and len(depths) > 1
        found = {side.name: _curve(quantity, side, share) for side in sides if quantity.table in side.tables}
        drawn = {name: curve for name, curve in found.items() if not curve.empty}
        if len(drawn) < 2:
            continue
        x = "share of the depth" if share else quantity.x
        words = {"name": quantity.name, "title": quantity.title, "x": x, "y": quantity.y, "caption": quantity.caption}
        quantities.append(words)
        curves += [curve.assign(subject=name, quantity=quantity.name) for name, curve in drawn.items()]
        whole = [name for name in drawn if not (quantity in measured_quantities() and name in partial)]
        rows = [row for name in whole for row in _number_rows(quantity, name, drawn[name])]
        numbers += rows
        findings += _findings(quantity, rows)
    if not quantities:
        raise _nothing_in_common({side.name: side.tables for side in sides})
    findings = [*_degenerate(sides), *_token_findings(sides, [words["name"] for words in quantities]), *findings]
    return {
        "findings": Frame([finding.record for finding in findings], columns=list(Finding("").record)),
        "numbers": Frame(numbers, columns=["quantity", "line", "number", "unit", "subject", "value"]),
        "quantities": Frame(quantities),
        "curves": pd.concat(curves, ignore_index=True)[["subject", "quantity", "line", "x", "y"]],
    }


def _degenerate(sides: Sequence[Side]) -> Iterator[Finding]:
    """What is degenerate or misread in each side; numbers of a side with layers left out are not compared."""
    for side in sides:
        for finding in (finding for kind in (Reading, Degenerate) for finding in kind().findings(side.tables, {})):
            yield replace(finding, text=f"{side.name}: {finding.text[0].lower()}{finding.text[1:]}")
        if left_out(side.tables):
            yield Finding(f"{side.name}: its numbers are of a part of its layers, and are not compared.", severity="warning")


def check_common(tables: Mapping[str, Collection[str]]) -> None:
    """Refuse subjects no two of which have a table in common, by the names of the tables that they have or will have."""
    if not any(sum(quantity.table in names for names in tables.values()) > 1 for quantity in all_quantities()):
        raise _nothing_in_common(tables)


def _nothing_in_common(tables: Mapping[str, Collection[str]]) -> InputError:
    have = "; ".join(f"{name}: {', '.join(sorted(names)) or 'nothing'}" for name, names in tables.items())
    return InputError(
        f"these have no measure in common ({have}); models can be compared, runs of one experiment, and whatever else has a "
        "table in common"
    )


def _watched(training: Path | None) -> Mapping[str, Frame]:
    """The tables of the watch of a training, if it was watched."""
    return {} if training is None or not has_segments(training / WATCHED) else open_run(training / WATCHED).all_tables()


def _distinct(given: Sequence[Any]) -> tuple[Any, ...]:
    """Refuse a comparison of fewer than two, or of a subject with itself."""
    subjects = tuple(map(as_source, given))
    if len(subjects) < 2:
        raise InputError("a comparison needs at least two models or runs")
    places = [_place(subject) for subject in subjects]
    twice = next((subject for subject, place in zip(subjects, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise InputError(f"'{_name_of(twice)}' is named twice: there is nothing to compare it with")
    return subjects


def _place(subject: Any) -> Any:
    """What tells subjects apart: the full path of a file or folder, another name as it is, an object by its identity."""
    if not isinstance(subject, str | Path):
        return id(subject)
    text = str(subject)
    return str(run_path(text)) if user_path(text, "model or run").exists() else text


def _name_of(subject: Any) -> str:
    """A name or path as it is; of a result its folder, its model or its experiment; of a model its name."""
    if isinstance(subject, Result):
        return str(subject.path or subject.configuration.get("model") or subject.kind.command)
    return str(subject) if isinstance(subject, str | Path) else str(getattr(subject, "name", type(subject).__name__))


def short_names(subjects: Sequence[Any]) -> list[str]:
    """The last part of each name without what all begin with, as far as that tells them apart; equal names are numbered."""
    names = [_name_of(subject) for subject in subjects]
    last = [Path(name).name or name for name in names]
    words = [re.findall(r"[^-_:]*[-_:]?", name) for name in last]
    common = sum(takewhile(lambda same: same, (len(set(same)) == 1 for same in zip(*words, strict=False))))
    rest = ["".join(parts[common:]) for parts in words]
    if all(name[:1].isalpha() for name in rest):  # a number alone is no name
        last = rest
    names = last if len(set(last)) == len(last) else names
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _curve(quantity: Quantity, side: Side, share: bool) -> Frame:
    curve = quantity.curve(side.tables[quantity.table])
    curve = curve.assign(line=curve.get("line", ""), x=curve["x"].astype(float), y=curve["y"].astype(float))
    return curve.assign(x=curve["x"] / side.depth) if share and side.depth else curve


def _number_rows(quantity: Quantity, subject: str, curve: Frame) -> Iterator[Row]:
    """The number of every line, if it has one."""
    for line in dict.fromkeys(map(str, curve["line"])):
        number = f"{quantity.number}, {line}" if line else quantity.number
        value = quantity.value(curve[curve["line"] == line])
        if math.isfinite(value):
            words = {"quantity": quantity.name, "line": line, "number": number, "unit": quantity.unit}
            yield {**words, "subject": subject, "value": value}


def _findings(quantity: Quantity, numbers: list[Row]) -> Iterator[Finding]:
    """A number's values, the largest first, and how far apart they are; of several lines the one where that is most."""
    lines = [[row for row in numbers if row["line"] == line] for line in dict.fromkeys(row["line"] for row in numbers)]
    shared = [sorted(rows, key=lambda row: -float(row["value"])) for rows in lines if len(rows) > 1]
    if not shared:
        return
    rows = max(shared, key=lambda rows: _apart(quantity, rows))
    listed, far = ", ".join(f"{row['subject']} {row['value']:.3g}{row['unit']}" for row in rows), _how_far(quantity, rows)
    if len(shared) == 1:
        said = f"{rows[0]['number']}: {listed}; {far or 'hardly a difference'}"
    elif far:
        said = f"{quantity.number} differs most for {rows[0]['line']}: {listed}; {far}"
    else:
        said = f"{quantity.number}: hardly a difference in any of {len(shared)} lines"
    apart = _apart(quantity, rows)
    yield Finding(
        f"{said[0].upper()}{said[1:]}.", quantity.name, title=quantity.title if far else "",
        number=apart if math.isfinite(apart) else None, weight=_weight(quantity, apart),
    )  # fmt: skip


def _weight(quantity: Quantity, apart: float) -> float:
    """What decides which differences come first: the logarithm of a ratio, or a difference."""
    return min(abs(math.log(apart)), 10.0) if quantity.ratio and apart > 0 else min(abs(apart), 10.0)


def _apart(quantity: Quantity, falling: list[Row]) -> float:
    """The largest over the smallest, infinite if that is nothing; or the largest less the smallest."""
    largest, smallest = falling[0]["value"], falling[-1]["value"]
    if not quantity.ratio:
        return float(largest - smallest)
    if largest <= _NOTHING:
        return 1.0
    return float(largest / smallest) if smallest > _NOTHING else math.inf


def _how_far(quantity: Quantity, falling: list[Row]) -> str:
    """How much more the largest is than the smallest, in words; nothing where three digits show no difference."""
    first, last = falling[0], falling[-1]
    apart, more = f"{_apart(quantity, falling):.3g}", f"{first['value'] - last['value']:.3g}"
    if more == "0" or (quantity.ratio and apart == "1"):
        return ""
    if quantity.ratio and apart != "inf":
        return f"{apart} times as much in {first['subject']} as in {last['subject']}"
    return f"{more}{first['unit']} more in {first['subject']} than in {last['subject']}"


def _token_rows(sides: Sequence[Side]) -> list[Row]:
    words = {"quantity": "tokens", "line": "", "number": "tokens read", "unit": ""}
    return [{**words, "subject": side.name, "value": float(side.tokens)} for side in sides if side.tokens]


def _token_findings(sides: Sequence[Side], figures: Sequence[str]) -> Iterator[Finding]:
    """A warning where subjects read different amounts, with the figure of the effective rank, which that bounds."""
    if len({side.tokens for side in sides if side.tokens}) > 1:
        listed = ", ".join(f"{side.name} {side.tokens:,}" for side in sides if side.tokens)
        yield Finding(
            f"Tokens read differ: {listed}. An effective rank is at most their number, and cosines and margins depend on what "
            "is read: some of the differences may come from that.",
            "rank" if "rank" in figures else figures[0],
            title="Samples of different size",
            severity="warning",
            advice="Compare with the same number of tokens.",
        )


def number_cell(value: float) -> str:
    """A number to four digits, a large count in full; – where there is none."""
    return f"{value:,.0f}" if value >= 10_000 and value.is_integer() else cell(value, ".4g")


def _number_tables(numbers: Frame) -> Iterator[PageTable]:
    """A row for each number, a column for each subject."""
    subjects = list(dict.fromkeys(map(str, numbers["subject"])))
    rows = []
    for number, group in numbers.groupby("number", sort=False):
        values = dict(zip(map(str, group["subject"]), floats(group["value"]), strict=True))
        unit = str(group["unit"].iloc[0])
        name = f"{number} ({unit})" if unit else str(number)
        rows.append((name, *(number_cell(values.get(subject, math.nan)) for subject in subjects)))
    if rows:
        yield PageTable("Side by side", ("", *subjects), tuple(rows))


def _chart(curves: Frame, words: Mapping[str, Any], settings: str) -> Chart:
    lines = tuple(
        Line(f"{subject}: {line}" if line else str(subject), floats(rows["x"]), floats(rows["y"]))
        for (subject, line), rows in curves.groupby(["subject", "line"], sort=False)
    )
    log = _wants_log(floats(curves["y"]))
    return Chart(words["title"], words["x"], words["y"], lines, words["caption"], settings, log_y=log)


def _map(values: Frame, words: Mapping[str, Any], settings: str) -> HeatMap:
    """Where lines are single values: a row for each line, a column for each subject."""
    cells = {(row["line"], row["subject"]): float(row["y"]) for row in plain_rows(values)}
    lines, subjects = (list(dict.fromkeys(map(str, values[name]))) for name in ("line", "subject"))
    grid = [[cells.get((line, subject), math.nan) for subject in subjects] for line in lines]
    return HeatMap(
        words["title"], "model or run", words["x"], words["y"], subjects, lines, grid, words["caption"], settings,
        log=_wants_log(cells.values()), from_top=True,
    )  # fmt: skip


def _wants_log(values: Iterable[float]) -> bool:
    """Whether a logarithmic scale shows more, and leaves nothing out."""
    shown = [value for value in values if math.isfinite(value)]
    return spans_decades(shown) and min(shown) > 0
