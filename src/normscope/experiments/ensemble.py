"""ensemble: Mean cosine over time, over many random starts and weights.

Schemes and theory: normscope ensemble --panel 5a --runs 1000
"""

import time as clock
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pandas as pd
from pydantic import model_validator

from normscope.experiments.experiment import Outcome, Seeded, Shown
from normscope.experiments.progress import SILENT, Progress
from normscope.experiments.result import Result
from normscope.experiments.settings import SIX_SCHEMES, Schemes, one_of, setting
from normscope.measures.base import Quantity
from normscope.measures.curves import by_scheme, last
from normscope.results.figures import Chart, Line
from normscope.results.sections import PageTable, Section
from normscope.results.tables import plain_rows
from normscope.runs import Parts

if TYPE_CHECKING:
    from normscope.dynamics import EnsembleRun

_TIMED_STEPS = 2
_SHOWN_TIMES = 5


class Ensemble(Seeded):
    """Mean cosine over time, over many random starts and weights.

    The band holds 90 % of the runs.
    All schemes see the same starts and weights, so differences between them are not sampling noise. An interrupted ensemble
    resumes from its last chunk when the same command is given again, and ends with the same numbers.

    Example:
        >>> import normscope as ns
        >>> run = ns.ensemble(scheme="pre,post", runs=4, tokens=8, dim=8, time=1, samples=3, progress=False)
        >>> run.tables["cosines"].columns.tolist()
        ['scheme', 'time', 'mean', 'low', 'high', 'stderr', 'runs']
    """

    command: ClassVar[str] = "ensemble"
    title: ClassVar[str] = "Ensemble with random weights"
    resumable: ClassVar[bool] = True
    usage: ClassVar[tuple[str, ...]] = (
        "normscope ensemble --panel 5a --runs 1000",
        "normscope ensemble --panel 5d --runs 200 --scheme pre,peri+qk,./mine.toml",
        "normscope ensemble --dim 256 --heads 4 --beta 8 --weights gaussian --scale 0.05 --time 30",
        "normscope ensemble --panel 5a --runs 100000 --out runs/5a     (interrupted? the same command resumes)",
    )
    quantities: ClassVar[tuple[Quantity, ...]] = (
        Quantity(
            "clusters", "Mean cosine over time, random weights", "time", "cosine", "How fast tokens cluster, scheme by scheme.",
            "cosines", by_scheme("time", "mean"), "mean cosine at the end of the ensemble", last, ratio=False,
        ),
    )  # fmt: skip

    panel: str | None = setting(None, "A published panel, 4 or 5a to 5g; the settings below then change it.", shown="")
    runs: int = setting(100, "Number of independent runs.", ge=1)
    scheme: Schemes = setting(SIX_SCHEMES, "Comma-separated schemes: names, or paths of TOML files.")
    tokens: int | None = setting(None, "Number of tokens n.", shown="128")
    dim: int | None = setting(None, "Dimension d.", shown="512")
    heads: int | None = setting(None, "Number of heads, each of width d/heads.", shown="1")
    beta: float | None = setting(None, "Factor on the attention logits.", shown="the panel's, else √(d/heads)")
    weights: str | None = setting(None, "kaiming or gaussian.", shown="kaiming")
    gain: float | None = setting(None, "Gain of Kaiming W_Q, W_K, W_V.", shown="√2")
    output_gain: float | None = setting(None, "Gain of Kaiming W_O.", shown="1")
    scale: float | None = setting(None, "Standard deviation of gaussian weights.", shown="0.02")
    redraw: float | None = setting(None, "Draw new weights after this much time; 0 keeps them.", shown="0")
    time: float | None = setting(None, "The last time.", shown="10")
    step: float | None = setting(None, "Largest time step.", shown="0.1")
    solver: str | None = setting(None, "midpoint or euler (the flow), or layers of the length of a step.", shown="midpoint")
    samples: int | None = setting(None, "Number of times at which the mean cosine is sampled.", shown="101")
    norm: Annotated[str | None, one_of("rms", "layer")] = setting(None, "The norm in every slot: rms or layer.", shown="rms")
    chunk: int | None = setting(None, "Runs computed and checkpointed together.", shown="16; 256 on a GPU")
    precision: str | None = setting(None, "float32 or bfloat16 products.", shown="float32; bfloat16 on a GPU")

    def memory(self) -> dict[str, float]:
        """The states and weights of a chunk, what is known of every step beforehand, and all mean cosines."""
        return self.job.memory

    @model_validator(mode="after")
    def _consistent(self) -> "Ensemble":
        self.job  # noqa: B018  # raises InputError for settings that cannot run
        return self

    @cached_property
    def job(self) -> "EnsembleRun":
        """The ensemble in chunks."""
        from normscope.dynamics.ensemble import Ensemble as Shape
        from normscope.dynamics.ensemble import setting_of
        from normscope.dynamics.ensemble_run import EnsembleRun

        on_gpu = self.device.startswith("cuda")
        given = {name: getattr(self, name) for name in Shape.__dataclass_fields__ if getattr(self, name) is not None}
        return EnsembleRun(
            setting=setting_of(self.panel, given),
            schemes=self.scheme if self.norm is None else tuple(scheme.with_norm(self.norm) for scheme in self.scheme),
            runs=self.runs,
            chunk=self.chunk if self.chunk is not None else (256 if on_gpu else 16),
            precision=self.precision or ("bfloat16" if on_gpu else "float32"),
            seed=self.seed,
            device=self.device,
        )

    @property
    def record(self) -> dict[str, Any]:
        """The job in full."""
        return self.job.record

    @property
    def field_values(self) -> dict[str, Any]:
        """Those of the panel where they are not given."""
        resolved = {**asdict(self.job.setting), "chunk": self.job.chunk, "precision": self.job.precision}
        return {**super().field_values, **resolved}

    @property
    def folder_name(self) -> str:
        """With the panel."""
        return f"ensemble-{self.panel}" if self.panel else "ensemble"

    @property
    def summary(self) -> str:
        """One line for people."""
        return self.job.summary

    def run(self, progress: Progress = SILENT, folder: Path | None = None) -> Result:
        """All chunks, those that are saved already first."""
        store = Nowhere() if folder is None else Parts.of(folder, self.record)
        if isinstance(store, Parts) and store.folder.exists():
            progress.message("resuming from the chunks that are finished")
        cosines = self.job.compute(store, progress.stage("running", self.runs))
        broken = self.job.not_finite(cosines)
        tables = {"cosines": self.job.table(cosines)}
        if broken:
            tables["divergence"] = pd.DataFrame({"reason": broken})
        return Result(
            type(self),
            self.record,
            tables,
            self.summary,
            self.seed,
            self.device,
            problems=tuple(f"{line}; means and bands are over the other runs" for line in broken),
            unfinished=store.folder,
        )

    @property
    def parts(self) -> int:
        """The chunks, which can be computed anywhere."""
        return self.job.parts

    def missing(self, folder: Path) -> list[int]:
        """Chunks that are not saved yet."""
        saved = Parts.of(folder, self.record)
        return [index for index in range(self.parts) if not saved.has(index)]

    def run_part(self, part: int, folder: Path) -> None:
        """Compute a chunk and save it."""
        self.job.compute_chunk(part, Parts.of(folder, self.record))

    @property
    def work(self) -> float:
        """Projections and attention of every token, scheme, run and evaluation."""
        shape = self.job.setting
        evaluation = 4 * shape.tokens * shape.dim**2 + 2 * shape.tokens**2 * shape.dim
        return float(self.runs * len(self.job.schemes) * shape.evaluations * evaluation)

    def seconds(self, progress: Progress = SILENT) -> float:
        """The time of a chunk of a few steps, as many times as there are steps and chunks."""
        shape = self.job.setting
        short = replace(shape, time=_TIMED_STEPS * shape.step, samples=2, redraw=0.0)
        timed = replace(self.job, setting=short, runs=min(self.runs, self.job.chunk))
        times = []
        for _ in range(2):  # the first one warms up
            started = clock.monotonic()
            timed.compute(Nowhere())
            times.append(clock.monotonic() - started)
        return min(times) * self.parts * shape.evaluations / short.evaluations

    @classmethod
    def outcome(cls, result: Result) -> Outcome:
        """The mean cosine of each scheme at the last time, and all curves."""
        table = result.tables["cosines"]
        last = table[table["time"] == table["time"].max()]
        numbers = {f"cosine_{name}": mean for name, mean in zip(last["scheme"], last["mean"], strict=True)}
        note = "; ".join(result.tables["divergence"]["reason"]) if "divergence" in result.tables else None
        return Outcome(numbers, table[["time", "scheme", "mean", "low", "high"]], note)

    @classmethod
    def records(cls, result: Result) -> list[dict[str, Any]]:
        """The table of mean cosines."""
        return result.tables["cosines"].to_dict("records")  # type: ignore[return-value]

    @classmethod
    def terminal(cls, result: Result) -> Iterator[Shown]:
        """Mean and band at a few times."""
        rows, times = plain_rows(result.tables["cosines"]), sorted(set(result.tables["cosines"]["time"]))
        shown = {times[round(i * (len(times) - 1) / _SHOWN_TIMES)] for i in range(1, _SHOWN_TIMES + 1)}
        cells = (
            (r["scheme"], f"{r['time']:g}", f"{r['mean']:.4f}", f"{r['low']:.4f}", f"{r['high']:.4f}", f"{r['stderr']:.1e}")
            for r in rows
            if r["time"] in shown
        )
        columns = ("scheme", "time", "mean cosine", "5 %", "95 %", "standard error")
        yield PageTable(f"up to t = {times[-1]:g}", columns, tuple(cells))

    @classmethod
    def sections(cls, result: Result) -> Iterator[Section]:
        """Mean cosine with its 90 % band for each scheme."""
        lines = tuple(
            Line(str(name), list(rows["time"]), list(rows["mean"]), list(rows["low"]), list(rows["high"]))
            for name, rows in result.tables["cosines"].groupby("scheme", sort=False)
        )
        chart = Chart(
            "Clustering with random weights",
            "time t",
            "mean cosine",
            lines,
            "Lines are means over runs, bands hold 90 % of them; all schemes saw the same starts and weights.",
            result.summary,
        )
        yield Section("Random weights", figures={"ensemble": chart}, name="ensemble")


class Nowhere:
    """Saves nothing."""

    folder: None = None

    def load(self, index: int) -> None:
        """Nothing is there."""

    def save(self, index: int, values: Any) -> None:
        """Nothing is kept."""
