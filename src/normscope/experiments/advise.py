"""advise: Rank schemes for a new model of a given shape.

Schemes and theory: normscope advise --depth 48 --width 2048 --heads 16
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import BeforeValidator, model_validator

from normscope.errors import InputError, require_known
from normscope.experiments.experiment import Seeded, Shown
from normscope.experiments.on_model import TRUST_HELP, ModelSource
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import Accepts, Schemes, as_list, one_of, setting
from normscope.experiments.trained import CHOSEN_ON, NOT_TRAINED, Verdicts, evidence_tables, packaged, shown, trained_table
from normscope.measures.base import Quantity
from normscope.measures.curves import last, values_of
from normscope.results.figures import Chart, HeatMap, Line
from normscope.results.findings import Finding, cards_text
from normscope.results.sections import PageTable, Section
from normscope.results.tables import cell, floats, plain_rows, spans_decades
from normscope.schemes import NAMED, Scheme

if TYPE_CHECKING:
    from normscope.dynamics.advice import Ranking, RunMeasures, Spectrum, Stack
    from normscope.dynamics.evidence import Correlation, Trust

Values = npt.NDArray[np.float64]
Row = dict[str, Any]

LEVELS = (0.01, 0.1)  # RMS of the relative noise on norms
_SPECTRUM = "spectrum-of"
_VERDICT = "language models"  # the basis of the first three findings
_STILL = 1e-3  # with a learned step that starts below, random layers move nothing
_GAUSSIAN = 0.02  # standard deviation of gaussian weights at the model's width
_MOST_TOKENS = 128
_OPERATIONS = {"cpu": 3e12, "cuda": 4e15}  # of a default simulation: a minute on 2 cores or on a GPU
_LAYER = 1400  # bytes of what tables and theory have of a layer
_NARROWEST = 8  # dimensions of a head that is made narrower to save time
_PASSES = 5.2  # forward, forward with noise at two levels, and forward and backward for the gradient
_RADII = 1e-35, 1e35  # norms that float32 holds with room for their sums
_BETA = 1.0  # of theory, as in its theorem on the first step
_COLLAPSED = 0.01  # 1 − mean cosine
_OFTEN = 0.01
_DECADES = 2.0  # a gradient that grows or shrinks by more needs care


def begins_still(scheme: Scheme) -> bool:
    """Whether a learned step starts so near 0 that blocks are the identity, of which random layers say nothing."""
    places = ((stage, stage.place(0.0, 12.0)) for stage in scheme.stages if stage.learns_alpha)
    return any(abs(stage.attention.number("step", place)) < _STILL for stage, place in places)


@dataclass(frozen=True)
class Criterion:
    """What schemes are ranked by.

    Attributes:
        key: its name in tables and JSON.
        name: its name in ``criteria``.
        title: what it is, for people.
        unit: of its values.
        low_is_better: whether small values are good.
        meaning: how it is measured.
        value: its values, one per scheme, in a run.
        theory: the column of the table ``theory`` with the same quantity, if there is one.
    """

    key: str
    name: str
    title: str
    unit: str
    low_is_better: bool
    meaning: str
    value: "Callable[[RunMeasures], Values]"
    theory: str = ""

    @property
    def good(self) -> str:
        """Which values are good."""
        return "low" if self.low_is_better else "high"

    @property
    def sign(self) -> float:
        """The factor that makes large values good."""
        return -1.0 if self.low_is_better else 1.0


def _third(run: "RunMeasures") -> int:
    return max(1, int(run.moved.shape[1]) // 3)


CRITERIA = (
    Criterion(
        "early", "early", "early movement", "°/layer", False,
        "rotation of a token per layer in the first third, after removing the rotation common to all tokens",
        lambda run: run.moved[:, : _third(run)].mean(1), "early",
    ),
    Criterion(
        "late", "late", "late movement", "°/layer", False, "the same in the last third",
        lambda run: run.moved[:, -_third(run) :].mean(1), "late",
    ),
    Criterion(
        "collapse", "diversity", "token diversity", "1 − cosine", False,
        "1 − mean cosine between tokens after the last layer; 0 is rank collapse", lambda run: run.gap[:, -1], "gap",
    ),
    Criterion(
        "gradient", "gradient", "gradient flow", "decades", True,
        "distance from 1, in powers of ten, of the gradient before the first layer over that before the last",
        lambda run: np.abs(run.gradient[:, 0] - run.gradient[:, -1]),
    ),
    Criterion(
        "noise", "noise", "robustness to norm noise", "°", True,
        f"rotation of the final directions by {100 * LEVELS[0]:.0f} % RMS noise on the norms of q, k and v",
        lambda run: run.drift[:, 0],
    ),
)  # fmt: skip
_NAMES = {criterion.name: criterion for criterion in CRITERIA} | {criterion.key: criterion for criterion in CRITERIA}
_KEYS = [criterion.key for criterion in CRITERIA]
_SIGNS = np.array([criterion.sign for criterion in CRITERIA])


def as_weights(value: Any) -> dict[str, float] | None:
    """Criteria to rank by with their weights, from ``early,noise=2``, names, or a mapping; None for those of the evidence."""
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else (_weighted(str(item)) for item in as_list(value))
    weights: dict[str, float] = {}
    for name, given in pairs:
        if name not in _NAMES:
            require_known("criterion", name, [criterion.name for criterion in CRITERIA])
        try:
            weight = float(given)
        except (TypeError, ValueError):
            raise InputError(f"the weight of criterion '{name}' is a number, not '{given}'") from None
        if not 0 < weight < math.inf:
            raise InputError(f"the weight of criterion '{name}' is a positive number, not {given}; leave it out for none")
        weights[_NAMES[name].key] = weight
    return weights


def _weighted(item: str) -> tuple[str, str]:
    name, _, weight = (piece.strip() for piece in item.partition("="))
    return name, weight or "1"


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
    """Rank schemes for a new model of a given shape.

    Language models that were trained say which schemes are safe, fast or fail at this depth.
    Then every scheme goes through the same random layers, and criteria that predicted the loss of those models rank them. The
    simulation shows how training starts, not what a model learns.

    Example:
        >>> import normscope as ns
        >>> advice = ns.advise(depth=3, width=32, heads=2, schemes="pre,post", runs=2, tokens=8, progress=False)
        >>> list(advice.tables["ranks"]["scheme"])
        ['pre', 'post']
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
    weights: Annotated[str, one_of("kaiming", "gaussian", _SPECTRUM)] = setting(
        "gaussian",
        "gaussian (0.02, as language models begin), kaiming, or spectrum-of MODEL: singular values of a model's heads.",
    )
    schemes: Schemes = setting(
        ",".join(name for name, scheme in NAMED.items() if not begins_still(scheme)),
        "Comma-separated schemes: names, or paths of TOML files.",
        shown="all named schemes but those whose step starts near 0",
    )
    rank_by: Annotated[
        dict[str, float] | None, BeforeValidator(as_weights), Accepts("str | Sequence[str] | Mapping[str, float] | None")
    ] = setting(
        None,
        f"Comma-separated criteria, optionally weighted: late,noise=2. There are {', '.join(c.name for c in CRITERIA)}.",
        shown="weights fitted to trained language models",
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
    norm: Annotated[str | None, one_of("rms", "layer")] = setting(None, "The norm in every slot: rms or layer.", shown="rms")

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
        if self.weights == _SPECTRUM and self.model is None:
            raise InputError(f"weights={_SPECTRUM} needs a model, such as package:smollm2")
        if self.weights != _SPECTRUM and self.model is not None:
            raise InputError(f"'{self.model}': a model is read with weights={_SPECTRUM} only, not with weights={self.weights}")
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
    def _simulated(self) -> tuple[Any, ...]:
        """What the simulation is known by in the file of predictions."""
        return self.weights, self.causal, self.feedforward, self.initial_norm

    @cached_property
    def tested(self) -> tuple[Any, ...] | None:
        """The simulated setting whose predictions were tested that is closest to this one; None if none was."""
        settings = packaged().settings()
        exact = self._simulated
        return min(settings, key=lambda other: [a != b for a, b in zip(exact, other, strict=True)], default=None)

    @cached_property
    def trust(self) -> "Trust | None":
        """How well the criteria predicted trained language models; None where too little was trained to tell."""
        return None if self.tested is None else packaged().trust(self.tested, _KEYS)

    @property
    def criteria(self) -> dict[str, float]:
        """The criteria to rank by with their weights: as chosen, fitted to trained models, or all equal where none tests them.

        Empty where no criterion predicted anything.
        """
        if self.rank_by is not None:
            return self.rank_by
        if self.trust is None:
            return dict.fromkeys(_KEYS, 1.0)
        return {key: float(weight) for key, weight in zip(_KEYS, self.trust.weights, strict=True) if weight}

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
        weights = np.array([self.criteria.get(key, 0.0) for key in _KEYS])
        ranking = rank(names, _KEYS, values, _SIGNS, weights, self.seed)
        theory = theory_table(self.compared, self.depth, (self.sampled, self.context), self.radius or 1.0)
        trained, predicted = trained_table(self.compared), _predicted_table(self)
        verdicts = Verdicts.of(packaged(), self.compared, self.depth)
        findings = [
            {"basis": basis, **finding.record} for basis, finding in _findings(self, ranking, theory, trained, verdicts)
        ]
        tables = {
            "findings": pd.DataFrame(findings),
            "ranks": ranking.order,
            "criteria": ranking.criteria,
            "pairs": ranking.pairs,
            "runs": _runs_table(names, values),
            "layers": _layers_table(names, measures),
            "noise": _noise_table(names, measures),
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
        listed = ("noise", "theory", "language_models", "trained")
        tables = {name: plain_rows(result.tables[name]) for name in ("ranks", "criteria", "verdicts", *listed)}

        def of(name: str, scheme: str) -> list[Row]:
            rows = (row for row in tables[name] if row["scheme"] == scheme)
            return [{key: value for key, value in row.items() if key != "scheme"} for row in rows]

        return [
            {
                **row,
                "level_with": [name for name in row["level_with"].split(", ") if name],
                "criteria": {values.pop("criterion"): values for values in of("criteria", row["scheme"])},
                "verdict": of("verdicts", row["scheme"])[0],
                **{name: of(name, row["scheme"]) for name in listed},
            }
            for row in tables["ranks"]
        ]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """What trained models say in three lines, the schemes, best first, and the findings that matter most."""
        tables = result.tables
        means = {(row.scheme, row.criterion): row for row in tables["criteria"].itertuples(index=False)}
        verdicts = {row["scheme"]: row for row in plain_rows(tables["verdicts"])}
        ranked = bool(result.configuration["criteria"])
        rows = tuple(
            (
                *((str(row.place), str(row.scheme)) if ranked else ("–", str(row.scheme))),
                f"{row.rank:.1f} ({row.low:.1f}–{row.high:.1f})" if ranked else "–",
                *(_cell(means[row.scheme, key]) for key in _KEYS),
                verdicts[row.scheme]["verdict"],
                shown(verdicts[row.scheme]["loss"], ".3f"),
            )
            for row in tables["ranks"].itertuples(index=False)
        )
        yield "\n".join(finding.text for basis, finding in _by_basis(tables["findings"]) if basis == _VERDICT)
        titles = (f"{criterion.name}, {criterion.unit}" for criterion in CRITERIA)
        yield PageTable("", ("place", "scheme", "mean rank", *titles, "trained here", "held-out loss"), rows)
        yield from cards_text([finding for basis, finding in _by_basis(tables["findings"]) if basis != _VERDICT])

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """The order with its findings, criteria with their intervals, curves by layer, theory, and what was trained."""
        settings, tables = result.summary, result.tables
        listed: dict[str, list[Finding]] = {}
        for basis, finding in _by_basis(tables["findings"]):
            listed.setdefault(basis, []).append(finding)
        findings = {basis: tuple(some) for basis, some in listed.items()}
        yield Section(
            "Trained language models",
            ("Language models that this project trained, and how well the simulation had predicted them.",),
            evidence_tables(tables["verdicts"], tables["predicted"], tables["language_models"]),
            findings=(*findings.get(_VERDICT, ()), *findings.get("prediction", ())),
        )
        yield Section(
            "Ranking",
            ("Ranks come from a simulation with random weights: how training starts, not what a model learns.",),
            (_order_table(tables["ranks"], tables["criteria"]),),
            {"ranks": _rank_map(tables["ranks"], tables["criteria"], settings)},
            findings.get("simulation", ()),
        )
        yield _criteria_section(tables["ranks"], tables["criteria"], settings)
        yield _layers_section(tables["ranks"], tables["layers"], settings)
        yield _theory_section(tables["theory"], findings.get("theory", ()))
        yield _trained_section(tables["trained"], findings.get("training", ()))
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


def theory_table(schemes: Sequence[Scheme], depth: int, tokens: Sequence[int], radius: float = 1.0) -> pd.DataFrame:
    """The reduced flow (identity weights, orthogonal start) of every scheme for each number of tokens.

    Columns: scheme, tokens, speed and radial (the laws as text), first_rate, early, late, gap (see ``reduced_flow``), and why
    there are none (``missing``), usually empty.
    """
    from normscope.dynamics.advice import reduced_flow
    from normscope.dynamics.symmetric import no_reduction

    rows = []
    for scheme in schemes:
        laws = [stage.law_of(stage.attention) for stage in scheme.stages]
        texts = {
            "speed": " then ".join(law.speed.text for law in laws),
            "radial": " then ".join(str(law.radial) for law in laws),
            "missing": no_reduction(scheme),
        }
        for n in dict.fromkeys(tokens):
            rows.append({"scheme": scheme.name, "tokens": n, **texts, **reduced_flow(scheme, depth, n, _BETA, radius)})
    return pd.DataFrame(rows)


def _runs_table(names: Sequence[str], values: Values) -> pd.DataFrame:
    rows = [
        {"scheme": name, "run": run, "criterion": key, "value": values[run, i, j]}
        for i, name in enumerate(names)
        for j, key in enumerate(_KEYS)
        for run in range(len(values))
    ]
    return pd.DataFrame(rows)


def _layers_table(names: Sequence[str], measures: "Sequence[RunMeasures]") -> pd.DataFrame:
    """Mean over runs and 90 % band at every layer: rotation by it, and cosine, norm and gradient before it.

    ``moved`` leaves out the rotation common to all tokens. The gradient is relative to that before the last layer, its mean a
    geometric one; a layer number beyond the last is the state after it.
    """
    from normscope.dynamics.advice import BAND

    columns = {
        "turned": np.stack([run.turned for run in measures]),
        "moved": np.stack([run.moved for run in measures]),
        "cosine": 1 - np.stack([run.gap for run in measures]),
        "gap": np.stack([run.gap for run in measures]),
        "radius": np.stack([run.radius for run in measures]),
        "gradient": np.stack([run.gradient - run.gradient[:, -1:] for run in measures]),
    }
    places = columns["gap"].shape[2]
    tables = []
    for i, name in enumerate(names):
        table = pd.DataFrame({"scheme": name, "layer": range(places)})
        for column, values in columns.items():
            padded = np.full((len(measures), places), np.nan)
            padded[:, : values.shape[2]] = values[:, i]
            numbers = np.stack([padded.mean(0), *np.quantile(padded, BAND, axis=0)])
            if column == "gradient":
                with np.errstate(over="ignore", under="ignore"):  # inf and 0 beyond what a float holds
                    numbers = 10**numbers
            table[column], table[f"{column}_low"], table[f"{column}_high"] = numbers
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _noise_table(names: Sequence[str], measures: "Sequence[RunMeasures]") -> pd.DataFrame:
    """The angle between the final directions with noise and without, by level: mean over runs and 90 % band."""
    from normscope.dynamics.advice import BAND

    drift = np.stack([run.drift for run in measures])
    rows = []
    for i, name in enumerate(names):
        for j, level in enumerate(LEVELS):
            low, high = np.quantile(drift[:, i, j], BAND)
            rows.append({"scheme": name, "noise": level, "angle": drift[:, i, j].mean(), "angle_low": low, "angle_high": high})
    return pd.DataFrame(rows)


def _by_basis(findings: pd.DataFrame) -> Iterator[tuple[str, Finding]]:
    """The findings of the table, each with its basis."""
    yield from ((row["basis"], Finding.of(row)) for row in plain_rows(findings))


def _findings(
    advise: Advise, ranking: "Ranking", theory: pd.DataFrame, trained: pd.DataFrame, verdicts: Verdicts
) -> Iterator[tuple[str, Finding]]:
    """Findings, each with its basis: language models, prediction, simulation, theory, training, or setting."""
    yield from ((_VERDICT, finding) for finding in verdicts.findings(_trusted(advise)))
    yield from (("prediction", finding) for finding in _predictions(advise))
    yield from (("simulation", finding) for finding in _simulated(advise, ranking))
    yield from (("theory", finding) for finding in _theory(advise, ranking, theory))
    yield from (("training", finding) for finding in _training(trained))
    yield from (("setting", finding) for finding in _setting(advise))


def _trusted(advise: Advise) -> str:
    """How far the order of the simulation can be trusted, in a sentence."""
    trust, names = advise.trust, [_NAMES[key].name for key in advise.criteria]
    if trust is None:
        return "Whether the simulation's criteria predict training is not known."
    if advise.rank_by is not None:
        return f"The simulation ranks by {_listed(names)}, as chosen."
    if not names:
        return "No criterion of the simulation predicted their loss, so none ranks."
    depths = packaged().trained[0]
    tested = [
        f"{each.value:+.2f} ({each.low:+.2f} to {each.high:+.2f}) at {depth} layers"
        for depth, each in zip(depths, trust.tested, strict=True)
        if math.isfinite(each.value)
    ]
    seen, fresh = ([str(depth) for depth in depths if (depth in CHOSEN_ON) == known] for known in (True, False))
    chosen = f"; what is simulated was chosen after the models of {_listed(seen)} layers were trained"
    chosen += f" and before those of {_listed(fresh)}, which are the fair test" * bool(fresh)
    return (
        f"The simulation ranks by {_listed(names)}; with weights fitted to the other depths, its rank correlation with the "
        f"loss is {_listed(tested) or 'not known'}{chosen * bool(seen)}."
    )


def _predictions(advise: Advise) -> Iterator[Finding]:
    """How well each criterion predicted the loss of trained models."""
    if advise.trust is None or advise.tested is None:
        return
    for criterion, each in zip(CRITERIA, advise.trust.correlations, strict=True):
        used = "it is used to rank" if criterion.key in advise.criteria else "it is not used to rank"
        yield Finding(
            f"{criterion.title.capitalize()} had a rank correlation of {each.value:+.2f} (90 % interval {each.low:+.2f} to "
            f"{each.high:+.2f} over {each.schemes} schemes) with the loss of trained models at {each.depths} depths; {used}.",
            f"criterion-{criterion.key}", number=each.value, comparison="1 is the same order, 0 no relation.",
        )  # fmt: skip
    if advise._simulated != advise.tested:
        weights, causal, feedforward, norm = advise.tested
        parts = (", a causal mask" * bool(causal), f", a feed-forward layer of {feedforward:g} widths" * bool(feedforward))
        kind = f"{weights} weights, initial states of norm {norm:g}{''.join(parts)}"
        yield Finding(f"Criteria were tested with {kind}; in the setting simulated here they were not.")


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

    trust, depths = advise.trust, packaged().trained[0]
    rows = [
        row(criterion.name, each, weight, criterion.key in advise.criteria)
        for criterion, each, weight in zip(CRITERIA, trust.correlations, trust.weights, strict=True)
    ]
    rows += [
        row(f"fitted on other depths, at {depth} layers", each, math.nan, False)
        for depth, each in zip(depths, trust.tested, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


def _simulated(advise: Advise, ranking: "Ranking") -> Iterator[Finding]:
    if advise.criteria:
        yield from _order(plain_rows(ranking.order))
    yield from _problems(advise, ranking.criteria)
    for criterion in CRITERIA:
        yield _best(ranking.criteria, criterion)
    yield from _alike(ranking.criteria)
    yield from _beaten(ranking.criteria)


def _order(order: list[Row]) -> Iterator[Finding]:
    first, last = order[0], order[-1]
    level = f"; not distinguishable from {first['level_with']}" if first["level_with"] else "; no other scheme is as good there"
    yield Finding(
        f"{first['scheme']} has the best mean rank over the simulated criteria, {first['rank']:.1f} of {len(order)} (90 % "
        f"interval {first['low']:.1f} to {first['high']:.1f}){level}.",
        "ranks",
        title=f"{first['scheme']} ranks first in simulation",
        severity="ok",
        number=first["rank"],
        comparison=f"Last is {last['scheme']} with {last['rank']:.1f}.",
        advice="Train the first few of the ranking before you decide: random weights show how training starts.",
        weight=3,
    )
    often = sorted((row for row in order if row["first"] >= _OFTEN), key=lambda row: -float(row["first"]))
    shares = ", ".join(f"{row['scheme']} {100 * row['first']:.0f} %" for row in often)
    yield Finding(
        f"Over all possible weights of the criteria, the first scheme is: {shares}.",
        "ranks",
        title="How much the order depends on the weights",
        severity="ok" if len(often) == 1 else "notice",
        number=often[0]["first"],
        advice="" if len(often) == 1 else "Weigh the criteria that matter to you, such as late,noise=2.",
        weight=2,
    )


def _problems(advise: Advise, criteria: pd.DataFrame) -> Iterator[Finding]:
    """Schemes that became non-finite, collapse, lose their gradient, or do not feel noise."""
    collapse, gradient, noise = (_rows(criteria, key) for key in ("collapse", "gradient", "noise"))
    if broken := [row for row in collapse if row["runs"] < advise.runs]:
        yield Finding(
            f"States became non-finite (inf/NaN) under {_schemes(broken)}: their criteria are not defined, and they rank last.",
            "layers-radius", title="Non-finite states", severity="warning", number=len(broken), weight=3,
            advice="Do not train these at this depth without smaller steps.",
        )  # fmt: skip
    named = {row["scheme"] for row in broken}
    for criterion in CRITERIA:
        if undefined := [row for row in _rows(criteria, criterion.key) if row["mean"] is None and row["scheme"] not in named]:
            yield Finding(
                f"{criterion.title.capitalize()} is not defined under {_schemes(undefined)}: tokens or gradients became 0, and "
                "so have no direction. Undefined values rank last.",
                f"criterion-{criterion.key}", title=f"{criterion.title.capitalize()} is not defined", severity="warning",
                number=len(undefined), weight=2,
            )  # fmt: skip
    if collapsed := [row for row in collapse if row["mean"] is not None and row["mean"] < _COLLAPSED]:
        yield Finding(
            f"After {advise.depth} layers all tokens point the same way (1 − mean cosine below {_COLLAPSED:g}) under "
            f"{_schemes(collapsed)}.",
            "layers-gap", title=f"Rank collapse in {len(collapsed)} of {len(collapse)} schemes", severity="warning",
            number=len(collapsed), comparison="Random tokens have 1 − mean cosine near 1.",
            advice="Prefer other schemes at this depth, or use fewer layers.", weight=2,
        )  # fmt: skip
    if wild := [row for row in gradient if row["mean"] is not None and row["mean"] > _DECADES]:
        untested = advise.trust is None or "gradient" in advise.criteria
        yield Finding(
            f"Gradients grow or shrink by more than {10**_DECADES:g}× through the layers under {_schemes(wild)}.",
            "layers-gradient", title=f"Unstable gradients in {len(wild)} of {len(gradient)} schemes",
            severity="warning" if untested else "notice", number=len(wild), weight=1,
            comparison="" if untested else "It did not predict the loss of language models trained with warm-up and clipping.",
            advice="These need warm-up, or a learning rate that depends on the layer.",
        )  # fmt: skip
    if calm := [row for row in noise if row["mean"] == 0]:
        yield Finding(
            f"Noise on norms has no effect under {_schemes(calm)}: q, k and v are normalised after it.", "criterion-noise",
            title="Immune to norm noise", severity="ok", number=0.0,
            comparison=f"Others rotate the final directions by up to {max(row['mean'] or 0 for row in noise):.3g}°.", weight=1,
        )  # fmt: skip


def _best(criteria: pd.DataFrame, criterion: Criterion) -> Finding:
    figure = f"criterion-{criterion.key}"
    rows = [row for row in _rows(criteria, criterion.key) if row["mean"] is not None]
    if not rows:
        return Finding(f"{criterion.title.capitalize()}: every scheme became non-finite.", figure, severity="warning")
    best = min(rows, key=lambda row: (float(row["rank"]), str(row["scheme"])))
    worst = max(rows, key=lambda row: float(row["rank"]))
    near = [row for row in rows if row is not best and row["low"] <= best["high"] and best["low"] <= row["high"]]
    level = f"; not distinguishable from it: {_named(near)}" if near else ""
    return Finding(
        f"Best in {criterion.title}: {best['scheme']}, {best['mean']:.3g} ({best['low']:.3g} to {best['high']:.3g}) "
        f"{criterion.unit}{level}.",
        figure, number=best["mean"], comparison=f"Last: {worst['scheme']}, {worst['mean']:.3g}.",
    )  # fmt: skip


def _alike(criteria: pd.DataFrame) -> Iterator[Finding]:
    """Groups of schemes that the criteria cannot distinguish, because what differs was not simulated or cancels."""
    means = _means(criteria)
    seen: set[str] = set()
    for name, own in means.iterrows():
        same = [str(other) for other, values in means.iterrows() if np.allclose(own, values, rtol=1e-3, atol=1e-6)]
        if len(same) > 1 and name not in seen:
            yield Finding(
                f"{', '.join(same)} have the same values: their attention differs in nothing simulated here.", "ranks"
            )
        seen |= set(same)


def _beaten(criteria: pd.DataFrame) -> Iterator[Finding]:
    """Schemes that another one beats in every criterion."""
    from normscope.dynamics.advice import ranks_of

    means = _means(criteria)
    scores = _SIGNS * means.to_numpy()
    names = [str(name) for name in means.index]
    for i, name in enumerate(names):
        better = (j for j in range(len(names)) if j != i and bool((ranks_of(scores[[j, i]])[0] == 1).all()))
        if by := [names[j] for j in better]:
            yield Finding(f"{name} is beaten in every criterion by {', '.join(by)}.", "ranks")


def _theory(advise: Advise, ranking: "Ranking", theory: pd.DataFrame) -> Iterator[Finding]:
    for reason, rows in theory[theory["missing"] != ""].groupby("missing"):
        yield Finding(f"Theory's flow is not given for {_schemes(plain_rows(rows))}: {reason}.")
    defined = theory[theory["missing"] == ""]
    if broken := [row for row in plain_rows(defined) if None in (row["early"], row["late"], row["gap"])]:
        yield Finding(
            f"The flow of theory became non-finite (inf/NaN) under {_schemes(broken)} at a norm of {advise.radius or 1:g}: its "
            "numbers are not defined there.",
            title="Theory is not defined for some schemes", severity="warning",
            number=len({row["scheme"] for row in broken}), weight=1,
        )  # fmt: skip
    at = theory[theory["tokens"] == advise.context].dropna()
    if len(at) < 2:
        return
    for column, third in (("early", "first"), ("late", "last")):
        ordered = at.sort_values(column, ascending=False)
        top, bottom = ordered.iloc[0], ordered.iloc[-1]
        yield Finding(
            f"With identity weights, orthogonal tokens and β = {_BETA:g}, the {third} third of {advise.depth} layers rotates "
            f"{advise.context:,} tokens most under {top['scheme']} ({top[column]:.3g}° per layer) and least under "
            f"{bottom['scheme']} ({bottom[column]:.3g}°).",
            f"criterion-{column}", number=top[column],
        )  # fmt: skip
    if agreed := agreement(ranking.criteria, theory, advise.sampled):
        listed = ", ".join(f"{_NAMES[key].name} {value:+.2f}" for key, value in agreed.items())
        yield Finding(
            f"Rank correlation of theory and simulation at {advise.sampled} tokens: {listed}.", "ranks",
            comparison="1 is the same order.",
        )  # fmt: skip


def agreement(criteria: pd.DataFrame, theory: pd.DataFrame, tokens: int) -> dict[str, float]:
    """Spearman's rank correlation between theory and simulation at the simulated tokens, by criterion."""
    at = theory[theory["tokens"] == tokens].set_index("scheme")
    means, correlations = _means(criteria), {}
    for criterion in CRITERIA:
        if not criterion.theory:
            continue
        both = pd.DataFrame({"theory": at[criterion.theory], "simulation": means[criterion.key]}).dropna()
        if len(both) > 2 and both.nunique().min() > 1:
            correlations[criterion.key] = float(np.corrcoef(both.rank().to_numpy().T)[0, 1])
    return correlations


def _training(trained: pd.DataFrame) -> Iterator[Finding]:
    rows = plain_rows(trained)
    for row in rows:
        if row["what"] != NOT_TRAINED:
            yield Finding(f"{row['scheme']}: {row['what']}: {row['value']} ({row['source']}).")
    if unknown := [row for row in rows if row["what"] == NOT_TRAINED]:
        yield Finding(f"Not trained on integer addition here: {_named(unknown)}.")


def _setting(advise: Advise) -> Iterator[Finding]:
    if advise.sampled < advise.context:
        yield Finding(
            f"{advise.sampled} sampled tokens stand for a context of {advise.context:,}. Attention over more random tokens "
            f"averages more of them out: without an output norm, sublayer outputs would be up to "
            f"{math.sqrt(advise.context / advise.sampled):.2g} times smaller at the full context. Theory is given for both."
        )
    if advise.simulated < advise.width:
        yield Finding(
            f"Width {advise.simulated} stands for {advise.width:,}, with all {advise.heads} heads and weights scaled so that "
            "queries, keys and values keep their norms.",
            advice=f"simulated_width={advise.width} simulates the full width.",
        )
    if advise.weights == _SPECTRUM:
        yield Finding(
            "Weights have the singular values of a trained model and random directions. A trained model's heads are aligned "
            "with its hidden states and these are not, so attention can be far sharper here, and values far larger relative to "
            "the initial states."
        )
    if not advise.hidden:
        yield Finding(
            "Blocks have attention only.", advice="feedforward=4 adds a random feed-forward layer of 4 widths to every block."
        )


def _means(criteria: pd.DataFrame) -> pd.DataFrame:
    """Mean by scheme and criterion, of schemes that have them all."""
    return criteria.pivot(index="scheme", columns="criterion", values="mean")[_KEYS].dropna()


def _rows(criteria: pd.DataFrame, key: str) -> list[Row]:
    return plain_rows(criteria[criteria["criterion"] == key])


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _named(rows: list[Row]) -> str:
    return ", ".join(str(row["scheme"]) for row in rows)


def _schemes(rows: list[Row]) -> str:
    distinct = list({row["scheme"]: row for row in rows}.values())
    return f"scheme{'s' * (len(distinct) > 1)} {_named(distinct)}"


def _cell(row: Any) -> str:
    """A mean with the half width of its interval."""
    return "not finite" if row.mean != row.mean else f"{row.mean:.3g} ± {(row.high - row.low) / 2:.1g}"


def _order_table(ranks: pd.DataFrame, criteria: pd.DataFrame) -> PageTable:
    means = _cells(criteria, "mean")
    rows = tuple(
        (
            row["scheme"],
            str(row["place"]),
            f"{row['rank']:.1f} ({row['low']:.1f} to {row['high']:.1f})",
            *(cell(means[row["scheme"], key], ".3g") for key in _KEYS),
            f"{100 * row['first']:.0f} %",
            row["level_with"] or "–",
        )
        for row in plain_rows(ranks)
    )
    titles = (f"{criterion.title} ({criterion.unit})" for criterion in CRITERIA)
    columns = ("scheme", "place", "mean rank", *titles, "first over all weights", "not distinguishable from")
    return PageTable("Schemes, best first", columns, rows)


def _cells(criteria: pd.DataFrame, column: str) -> dict[tuple[str, str], float]:
    """A column by scheme and criterion."""
    places = zip(map(str, criteria["scheme"]), map(str, criteria["criterion"]), strict=True)
    return dict(zip(places, floats(criteria[column]), strict=True))


def _rank_map(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> HeatMap:
    names = [str(name) for name in ranks["scheme"]]
    values = _cells(criteria, "rank")
    return HeatMap(
        "Rank in every criterion", "criterion", "scheme, best overall at the top", "rank, 1 is best",
        [criterion.title for criterion in CRITERIA], names, [[values[name, key] for key in _KEYS] for name in names],
        "A row that is dark throughout is good at everything; most rows are not.", settings,
        limits=(1.0, max(2.0, float(len(names)))), from_top=True,
    )  # fmt: skip


def _criteria_section(ranks: pd.DataFrame, criteria: pd.DataFrame, settings: str) -> Section:
    order = [str(name) for name in ranks["scheme"]]
    figures = {}
    for criterion in CRITERIA:
        rows = criteria[criteria["criterion"] == criterion.key].set_index("scheme").loc[order]
        lines = tuple(
            Line(f"{place} {scheme}", [place], [row["mean"]], [row["low"]], [row["high"]], dots=True)
            for place, (scheme, row) in enumerate(rows.iterrows(), 1)
        )
        means = floats(rows["mean"].dropna())
        log = spans_decades(means) and min(means) > 0  # a zero is the best there is, and must be visible
        figures[f"criterion-{criterion.key}"] = Chart(
            criterion.title.capitalize(), "scheme, in overall order", criterion.unit, lines,
            f"{'Lower' if criterion.low_is_better else 'Higher'} is better: {criterion.meaning}.", settings, log_y=log,
        )  # fmt: skip
    text = (
        "Dots are means over runs, bars 90 % intervals of the mean: runs redrawn with replacement, the same for all "
        "schemes. All schemes had the same starts, weights and noise.",
    )
    return Section("Criteria", text, figures=figures)


_CURVES = {
    "moved": (
        "Movement by layer", "degrees", True,
        "A good scheme moves tokens far early and still moves them late; the rotation common to all tokens is removed.",
    ),
    "turned": (
        "Rotation by layer", "degrees", False,
        "The whole rotation: high here and low in the figure above is a cluster that rotates as one.",
    ),
    "gap": ("Diversity by layer", "1 − mean cosine", True, "A line that falls to 0 is rank collapse."),
    "radius": ("Residual norm by layer", "mean |x|", True, "A growing norm is what slows Pre-LN down."),
    "gradient": (
        "Gradient by layer", "relative to the last layer", True,
        "A line far from 1 on the left is a gradient that explodes or vanishes on its way back.",
    ),
}  # fmt: skip


def _layers_section(ranks: pd.DataFrame, layers: pd.DataFrame, settings: str) -> Section:
    groups = {str(name): rows for name, rows in layers.groupby("scheme", sort=False)}
    figures = {}
    for column, (title, unit, log, caption) in _CURVES.items():
        lines = []
        for name in map(str, ranks["scheme"]):
            drawn = groups[name][groups[name][column].notna()]
            x, y, low, high = (floats(drawn[key]) for key in ("layer", column, f"{column}_low", f"{column}_high"))
            lines.append(Line(name, x, y, low, high))
        figures[f"layers-{column}"] = Chart(title, "layer", unit, tuple(lines), caption, settings, log_y=log)
    text = (
        "Lines are means over runs, bands hold 90 % of the runs. Layers count from 0; the last point is the state after the "
        "last layer.",
    )
    return Section("Layer by layer", text, figures=figures)


def _theory_section(theory: pd.DataFrame, findings: tuple[Finding, ...]) -> Section:
    rows = tuple(
        (
            *(row["scheme"], f"{row['tokens']:,}", row["speed"], row["radial"]),
            *("–" if row[name] is None else f"{row[name]:.3g}" for name in ("first_rate", "early", "late", "gap")),
        )
        for row in plain_rows(theory)
    )
    text = (
        "The law of every scheme follows from its slots: directions obey θ̇ = (1/s) P A, norms ṙ. The numbers belong to the "
        "flow with identity weights from an orthogonal start, where all pairs of tokens have the same cosine γ: γ̇ at the "
        "start as in Theorem 4.1, rotation per layer in the first and last third in degrees, and 1 − γ at the end.",
    )
    columns = ("scheme", "tokens", "speed factor s", "radial rate ṙ", "γ̇ at 0", "early", "late", "1 − γ at the end")
    return Section("Theory", text, (PageTable("Theory beside the simulation", columns, rows),), findings=findings)


def _trained_section(trained: pd.DataFrame, findings: tuple[Finding, ...]) -> Section:
    rows = tuple((row["scheme"], row["what"], row["value"] or "–", row["source"] or "–") for row in plain_rows(trained))
    text = ("Only what this project trained itself is listed here.",)
    columns = ("scheme", "what", "measured", "source")
    return Section(
        "Models that add integers",
        text,
        (PageTable("Models that add integers", columns, rows),),
        findings=findings,
        folded=True,
    )
