"""advise: Report which schemes suit a new model of a given shape.

Schemes and theory: normscope advise --depth 48 --width 2048 --heads 16
"""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import BeforeValidator, model_validator

from normscope.errors import InputError
from normscope.experiments.advise_findings import SPECTRUM, VERDICT, findings_of
from normscope.experiments.advise_page import (
    criteria_section,
    evidence_tables,
    layers_section,
    order_table,
    rank_map,
    theory_section,
    trained_section,
)
from normscope.experiments.criteria import (
    CRITERIA,
    KEYS,
    LEVELS,
    SIGNS,
    Criterion,
    as_weights,
    layers_table,
    noise_table,
    runs_table,
    theory_table,
)
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.on_model import TRUST_HELP, ModelSource
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Schemes, one_of, setting
from normscope.experiments.trained import Evidence, Verdicts, packaged, trained_table
from normscope.measures.base import Quantity
from normscope.measures.curves import last, values_of
from normscope.results.findings import Finding, cards_text, listed
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.schemes import NAMED, Scheme

if TYPE_CHECKING:
    from normscope.dynamics.advice import Spectrum, Stack
    from normscope.dynamics.evidence import Correlation, Trust

Row = dict[str, Any]

_STILL = 1e-3  # with a learned step that starts below, random layers move nothing
_GAUSSIAN = 0.02  # standard deviation of gaussian weights at the model's width
_MOST_TOKENS = 128
_OPERATIONS = {"cpu": 3e12, "cuda": 4e15}  # of a default simulation: a minute on 2 cores or on a GPU
_LAYER = 1400  # bytes of what tables and theory have of a layer
_NARROWEST = 8  # dimensions of a head that is made narrower to save time
_PASSES = 5.2  # forward, forward with noise at two levels, and forward and backward for the gradient
_RADII = 1e-35, 1e35  # norms that float32 holds with room for their sums


def begins_still(scheme: Scheme) -> bool:
    """Whether a learned step starts so near 0 that blocks are the identity, of which random layers say nothing."""
    places = ((stage, stage.place(0.0, 12.0)) for stage in scheme.stages if stage.learns_alpha)
    return any(abs(stage.attention.number("step", place)) < _STILL for stage, place in places)


def _advised(criterion: Criterion) -> Quantity:
    """A criterion as something that runs are compared by, scheme by scheme."""
    values = values_of("scheme", "mean")
    return Quantity(
        f"advice-{criterion.key}", criterion.title.capitalize(), "scheme", criterion.unit,
        f"{criterion.good.capitalize()} is good; a row of one colour is a scheme that does equally well everywhere.",
        "criteria", lambda table: values(table[table["criterion"] == criterion.key]),
        f"{criterion.title} ({criterion.unit}, {criterion.good} is good)", last,
        ratio=criterion.unit != "decades",  # which are logarithms of ratios already
    )  # fmt: skip


class Advise(Seeded):
    """Report which schemes suit a new model of a given shape.

    Reports which schemes were safe, reached the lowest loss, or failed in language models trained at this depth.
    Then every scheme goes through the same random layers. Criteria that predicted the loss of those models rank the schemes; if
    none did, trained losses order them. The simulation shows how training starts, not what a model learns.

    Example:
        >>> import normscope as ns
        >>> advice = ns.advise(depth=3, width=32, heads=2, schemes="pre,post", runs=2, tokens=8, progress=False)
        >>> list(advice.tables["ranks"]["scheme"])
        ['post', 'pre']
    """

    command: ClassVar[str] = "advise"
    title: ClassVar[str] = "Which scheme for this shape"
    usage: ClassVar[tuple[str, ...]] = (
        "normscope advise --depth 48 --width 2048 --heads 16 --context 4096",
        "normscope advise --depth 12 --width 768 --heads 12 --weights kaiming --schemes pre,peri,./mine.toml",
        "normscope advise --depth 30 --width 576 --heads 9 --weights spectrum-of package:smollm2",
        "normscope advise --depth 24 --width 1024 --heads 16 --rank-by late,diversity,noise=2 --json",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = tuple(map(_advised, CRITERIA))

    model: ModelSource | None = setting(
        None, "The model of weights=spectrum-of: a folder, hub name, GGUF file, package:smollm2.", argument=True
    )
    trust_remote_code: bool = setting(False, TRUST_HELP)
    depth: int = setting(help="Number of layers.", ge=1)
    width: int = setting(help="Dimension of the model.", ge=1)
    heads: int = setting(help="Number of heads.", ge=1)
    context: int = setting(4096, "Tokens that the model will attend to.", ge=2)
    weights: Annotated[str, one_of("kaiming", "gaussian", SPECTRUM)] = setting(
        "gaussian",
        "gaussian (0.02, as language models begin), kaiming, or spectrum-of MODEL: singular values of a model's heads.",
    )
    schemes: Schemes = setting(
        ",".join(name for name, scheme in NAMED.items() if not begins_still(scheme)),
        "Comma-separated schemes: names, or paths of TOML files.",
        shown=f"all named schemes except {listed([name for name, scheme in NAMED.items() if begins_still(scheme)])}",
    )
    rank_by: Annotated[
        dict[str, float] | None, BeforeValidator(as_weights), Accepts("str | Sequence[str] | Mapping[str, float] | None")
    ] = setting(
        None,
        f"Comma-separated criteria, optionally weighted: late,noise=2. There are {', '.join(c.name for c in CRITERIA)}.",
        shown="what predicted the loss of trained models, if anything did",
    )
    runs: int = setting(8, "Independent draws of start, weights and noise.", ge=2)
    tokens: int | None = setting(None, "Tokens to simulate.", shown="the context, at most 128", ge=2)
    simulated_width: int | None = setting(None, "Width to simulate.", shown="the width, or less to fit the time", ge=1)
    feedforward: float = setting(
        3.0, "Hidden width of a random feed-forward layer in every block, in widths; 0 for none.", ge=0, allow_inf_nan=False
    )
    causal: bool = setting(True, "Use a causal mask.", option="--causal/--no-causal")
    radius: float | None = setting(
        None, "Norm of the initial states; the output of a norm has 1.", shown="0.02 with gaussian weights, else 1", gt=0,
        allow_inf_nan=False,
    )  # fmt: skip
    norm: Annotated[str | None, one_of("rms", "layer")] = setting(
        None, "The norm in every slot: rms or layer.", shown="each scheme's own"
    )

    def memory(self) -> dict[str, float]:
        """States and weights of the runs at work, the tables by layer, and the redraws of the ranking."""
        from normscope.dynamics.advice import REDRAWS, runs_at_a_time

        schemes, state = len(self.schemes), 4.0 * self.sampled * self.simulated
        working = min(runs_at_a_time(self.device), self.runs)
        weights = 4 * (16.0 * self.simulated**2 + 6.0 * self.simulated * self.hidden)
        return {
            f"depth={self.depth}": self.depth * (_LAYER * (schemes + 1) + working * schemes * state),
            f"tokens={self.sampled}, width={self.simulated}": working * (48 * state + weights),
            f"runs={self.runs}": self.runs * (8.0 * REDRAWS * (1 + len(CRITERIA) * schemes) + 40.0 * self.depth * schemes),
        }

    @model_validator(mode="after")
    def _consistent(self) -> "Advise":
        from normscope.dynamics.motion import check_schemes

        check_schemes(self.schemes, self.depth)
        for name, width in (("width", self.width), ("simulated_width", self.simulated_width or self.heads)):
            if width % self.heads:
                raise InputError(
                    f"{name}={width} cannot be divided among {self.heads} heads; choose a multiple of {self.heads}"
                )
        if not _RADII[0] <= self.initial_norm <= _RADII[1]:
            low, high = _RADII
            raise InputError(
                f"radius={self.initial_norm:g}: the simulation runs in float32, whose norms are {low:g} to {high:g} here"
            )
        if self.tokens is not None and self.tokens > self.context:
            raise InputError(f"tokens={self.tokens} is more than context={self.context}")
        if self.simulated_width is not None and self.simulated_width > self.width:
            raise InputError(f"simulated_width={self.simulated_width} is more than width={self.width}")
        if self.simulated // self.heads < 2:
            raise InputError(f"a head needs at least 2 dimensions; width={self.simulated} with heads={self.heads} gives fewer")
        if self.weights == SPECTRUM and self.model is None:
            raise InputError(f"weights={SPECTRUM} needs a model, such as package:smollm2")
        if self.weights != SPECTRUM and self.model is not None:
            raise InputError(f"'{self.model}': a model is read with weights={SPECTRUM} only, not with weights={self.weights}")
        return self

    @property
    def compared(self) -> tuple[Scheme, ...]:
        """The schemes, with ``norm`` in every slot if one is given."""
        return self.schemes if self.norm is None else tuple(scheme.with_norm(self.norm) for scheme in self.schemes)

    @property
    def initial_norm(self) -> float:
        """Norm of the initial states: embeddings of standard deviation 0.02 have it where a norm's output has 1."""
        return self.radius if self.radius is not None else _GAUSSIAN if self.weights == "gaussian" else 1.0

    @property
    def sampled(self) -> int:
        """The tokens that are simulated."""
        return min(self.context, _MOST_TOKENS) if self.tokens is None else self.tokens

    @cached_property
    def simulated(self) -> int:
        """The width that is simulated: heads are halved until the simulation fits the time, by kind of device."""
        if self.simulated_width is not None:
            return self.simulated_width
        head = self.width // self.heads
        most = _OPERATIONS[self.device.partition(":")[0]]
        while head >= 2 * _NARROWEST and self.operations(head * self.heads) > most:
            head //= 2
        return head * self.heads

    def operations(self, width: int) -> float:
        """Matrix operations at a width: products with W_Q, W_K, W_V, W_O, q kᵀ, pattern · v, and the feed-forward layer."""
        n = self.sampled
        a_layer = (8 + 4 * self.feedforward) * n * width**2 + 4 * n**2 * width
        return _PASSES * a_layer * self.depth * len(self.schemes) * self.runs

    @property
    def simulated_setting(self) -> tuple[Any, ...]:
        """What the simulation is known by in the file of predictions."""
        return self.weights, self.causal, self.feedforward, self.initial_norm

    @property
    def untested(self) -> bool:
        """Whether the simulation differs from all whose predictions were tested, which have the norms of the schemes."""
        return self.simulated_setting != self.tested or self.compared != self.schemes

    @property
    def evidence(self) -> Evidence:
        """What was trained, and what had been predicted of it."""
        return packaged()

    @cached_property
    def tested(self) -> tuple[Any, ...] | None:
        """The simulated setting whose predictions were tested that is closest to this one; None if none was."""
        settings = self.evidence.settings()
        exact = self.simulated_setting
        return min(settings, key=lambda other: [a != b for a, b in zip(exact, other, strict=True)], default=None)

    @cached_property
    def trust(self) -> "Trust | None":
        """How well the criteria predicted trained language models; None where too little was trained to tell."""
        return None if self.tested is None else self.evidence.trust(self.tested, KEYS)

    @property
    def criteria(self) -> dict[str, float]:
        """The criteria to rank by with their weights: as chosen, fitted to trained models, or all equal where none tests them.

        Empty where no criterion predicted anything.
        """
        if self.rank_by is not None:
            return self.rank_by
        if self.trust is None:
            return dict.fromkeys(KEYS, 1.0)
        return {key: float(weight) for key, weight in zip(KEYS, self.trust.weights, strict=True) if weight}

    @property
    def hidden(self) -> int:
        """Hidden width of the feed-forward layer that is simulated; 0 for none."""
        return round(self.feedforward * self.simulated)

    @property
    def summary(self) -> str:
        """One line for people: the model's shape, and what was simulated."""
        block = "attention only" if not self.hidden else f"attention and a feed-forward layer of {self.feedforward:g} widths"
        return (
            f"{self.depth} layers, width {self.width}, {self.heads} heads, context {self.context}; simulated: {self.sampled} "
            f"tokens, width {self.simulated}, {block}, {'causal, ' if self.causal else ''}{self.weights} weights, new in every "
            f"layer, {self.runs} runs, float32; seed {self.seed}"
        )

    def stack(self, spectrum: "Spectrum | None" = None) -> "Stack":
        """The random layers, with every setting resolved."""
        from normscope.dynamics.advice import Stack

        return Stack(
            depth=self.depth, width=self.simulated, heads=self.heads, tokens=self.sampled, weights=self.weights,
            scale=_GAUSSIAN * math.sqrt(self.width / self.simulated), hidden=self.hidden, causal=self.causal,
            radius=self.initial_norm, levels=LEVELS, spectrum=spectrum, device=self.device, seed=self.seed,
        )  # fmt: skip

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """Simulate all schemes, rank them, and put theory and what was trained beside."""
        from normscope.dynamics.advice import measure_runs, rank

        spectrum = None if self.model is None else spectrum_of(self.model, self.trust_remote_code)
        advance = progress.stage("simulating layers", 2 * self.depth * self.runs)
        measures = measure_runs(self.stack(spectrum), self.compared, self.runs, advance)
        names = [scheme.name for scheme in self.compared]
        values = np.stack([np.stack([criterion.value(run) for criterion in CRITERIA], 1) for run in measures])
        weights = np.array([self.criteria.get(key, 0.0) for key in KEYS])
        ranking = rank(names, KEYS, values, SIGNS, weights, self.seed)
        verdicts = Verdicts.of(self.evidence, self.compared, self.depth)
        order = ranking.order if self.criteria else pd.DataFrame({"scheme": verdicts.order}, columns=ranking.order.columns)
        theory = theory_table(self.compared, self.depth, (self.sampled, self.context), self.radius or 1.0)
        trained, predicted = trained_table(self.compared), _predicted_table(self)
        findings = [
            {"basis": basis, **finding.record} for basis, finding in findings_of(self, ranking, theory, trained, verdicts)
        ]
        tables = {
            "findings": pd.DataFrame(findings),
            "ranks": order,
            "criteria": ranking.criteria,
            "pairs": ranking.pairs,
            "runs": runs_table(names, values),
            "layers": layers_table(names, measures),
            "noise": noise_table(names, measures),
            "theory": theory,
            "verdicts": verdicts.table,
            "predicted": predicted,
            "language_models": verdicts.runs(self.compared),
            "trained": trained,
        }
        resolved = {
            "tokens": self.sampled,
            "simulated_width": self.simulated,
            "radius": self.initial_norm,
            "criteria": self.criteria,
        }
        return Result(type(self), {**self.record, **resolved}, tables, self.summary, self.seed, self.device)

    @classmethod
    def records(cls, result: Result) -> list[Row]:
        """A record for every scheme, the best first: place, ranks, criteria, noise, theory, and what training came to."""
        tabled = ("noise", "theory", "language_models", "trained")
        tables = {name: plain_rows(result.tables[name]) for name in ("ranks", "criteria", "verdicts", *tabled)}

        def of(name: str, scheme: str) -> list[Row]:
            rows = (row for row in tables[name] if row["scheme"] == scheme)
            return [{key: value for key, value in row.items() if key != "scheme"} for row in rows]

        return [
            {
                **row,
                "level_with": [name for name in (row["level_with"] or "").split(", ") if name],
                "criteria": {values.pop("criterion"): values for values in of("criteria", row["scheme"])},
                "verdict": of("verdicts", row["scheme"])[0],
                **{name: of(name, row["scheme"]) for name in tabled},
            }
            for row in tables["ranks"]
        ]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """What trained models show in a few lines, the schemes, best first, and the findings that matter most."""
        tables = result.tables
        means = {(row.scheme, row.criterion): row for row in tables["criteria"].itertuples(index=False)}
        verdicts = {row["scheme"]: row for row in plain_rows(tables["verdicts"])}
        ranked = bool(result.configuration["criteria"])
        rows = tuple(
            (
                str(row.scheme),
                *((str(row.place), f"{row.rank:.1f} ({row.low:.1f}–{row.high:.1f})") if ranked else ()),
                verdicts[row.scheme]["verdict"],
                _loss(verdicts[row.scheme]),
                *(_cell(means[row.scheme, key]) for key in KEYS),
            )
            for row in tables["ranks"].itertuples(index=False)
        )
        yield "\n".join(finding.text for basis, finding in _by_basis(tables["findings"]) if basis == VERDICT)
        titles = (f"{criterion.name}, {criterion.unit}" for criterion in CRITERIA)
        places = ("place", "mean rank") if ranked else ()
        used = result.configuration
        title = f"Simulated with {used['tokens']} tokens at width {used['simulated_width']}; ± is half of a 90 % interval"
        yield PageTable(title, ("scheme", *places, "trained here", "loss (best rate)", *titles), rows)
        yield from cards_text([finding for basis, finding in _by_basis(tables["findings"]) if basis != VERDICT])

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The order with its findings, criteria with their intervals, curves by layer, theory, and what was trained."""
        settings, tables = result.summary, result.tables
        grouped: dict[str, list[Finding]] = {}
        for basis, finding in _by_basis(tables["findings"]):
            grouped.setdefault(basis, []).append(finding)
        findings = {basis: tuple(some) for basis, some in grouped.items()}
        yield Section(
            "Trained language models",
            ("Language models that this project trained, and how well the simulation had predicted them.",),
            evidence_tables(tables["verdicts"], tables["predicted"], tables["language_models"]),
            findings=(*findings.get(VERDICT, ()), *findings.get("published", ()), *findings.get("prediction", ())),
        )
        yield Section(
            "Ranking",
            ("Ranks come from a simulation with random weights: how training starts, not what a model learns.",),
            (order_table(tables["ranks"], tables["criteria"], bool(result.configuration["criteria"])),),
            {"ranks": rank_map(tables["ranks"], tables["criteria"], settings)},
            findings.get("simulation", ()),
        )
        yield criteria_section(tables["ranks"], tables["criteria"], settings)
        yield layers_section(tables["ranks"], tables["layers"], settings)
        yield theory_section(tables["theory"], findings.get("theory", ()))
        yield trained_section(tables["trained"], findings.get("training", ()))
        if "setting" in findings:
            yield Section("What was simulated", (settings,), findings=findings["setting"])


def spectrum_of(model: Any, trust_remote_code: bool = False) -> "Spectrum":
    """Singular values of W_QK and W_VO of every head of a model."""
    import torch

    from normscope.dynamics.advice import Spectrum
    from normscope.models import open_model
    from normscope.models.factors import singular_factors

    opened = open_model(model, "cpu", tokenizer=False, trust_remote_code=trust_remote_code)
    layers = [opened.projections(layer) for layer in range(opened.layers)]
    qk = [singular_factors(w.W_Q.double(), w.W_K.double().mT).values.cpu() for w in layers]
    vo = [singular_factors(w.W_V.double(), w.W_O.double()).values.cpu() for w in layers]
    spectrum = Spectrum(torch.stack(qk), torch.stack(vo))
    for matrix, values in (("W_QK", spectrum.qk), ("W_VO", spectrum.vo)):
        if not bool(values.float().isfinite().all()):
            raise InputError(
                f"'{opened.name}': {matrix} of some heads is too large for its precision, and has no singular values"
            )
    return spectrum


def _by_basis(findings: pd.DataFrame) -> Iterator[tuple[str, Finding]]:
    """The findings of the table, each with its basis."""
    yield from ((row["basis"], Finding.of(row)) for row in plain_rows(findings))


def _predicted_table(advise: Advise) -> pd.DataFrame:
    """How well criteria predicted the loss of trained models: rank correlation with interval, and the weight it gave them.

    The last rows are the weighted mean of ranks at each depth, with weights fitted to the other depths alone.
    """
    columns = ["criterion", "correlation", "low", "high", "schemes", "weight", "ranks"]
    if advise.trust is None:
        return pd.DataFrame(columns=columns)

    def row(name: str, each: "Correlation", weight: float, ranks: bool) -> Row:
        numbers = {"correlation": each.value, "low": each.low, "high": each.high, "schemes": each.schemes}
        return {"criterion": name, **numbers, "weight": weight, "ranks": ranks}

    trust, depths = advise.trust, advise.evidence.tuned
    rows = [
        row(criterion.name, each, weight, criterion.key in advise.criteria)
        for criterion, each, weight in zip(CRITERIA, trust.correlations, trust.weights, strict=True)
    ]
    rows += [
        row(f"fitted on other depths, at {depth} layers", each, math.nan, False)
        for depth, each in zip(depths, trust.tested, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def _loss(verdict: Row) -> str:
    """The held-out loss, and the learning rate that it belongs to."""
    return "–" if verdict["loss"] is None else f"{verdict['loss']:.3f} ({verdict['rate']:g})"


def _cell(row: Any) -> str:
    """A mean with the half width of its interval."""
    return "not finite" if row.mean != row.mean else f"{row.mean:.3g} ± {(row.high - row.low) / 2:.1g}"
