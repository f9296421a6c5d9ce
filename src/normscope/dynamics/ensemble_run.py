"""An ensemble as a job in chunks: finished chunks are saved, and not computed again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch

from normscope.core.devices import is_elsewhere
from normscope.dynamics.ensemble import (
    PLAIN,
    Cosines,
    Ensemble,
    Kernels,
    chunk_seeds,
    not_finite,
    run_chunk,
    summarise,
)
from normscope.dynamics.motion import check_schemes
from normscope.errors import InputError, require_known
from normscope.machine.memory import require_memory
from normscope.schemes import Scheme

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


_COMPILED_FROM_CHUNKS = 16
_STAGE = 14e3  # bytes of what is known of an evaluation beforehand
_CHUNK = 1000  # bytes of a chunk's seed and array


@lru_cache(maxsize=1)
def _compiled(job: str) -> Kernels:
    """Once for all chunks of a job; a process that is given many jobs would run into the compiler's limit for one function."""
    torch.compiler.reset()
    return Kernels.compiled()


@runtime_checkable
class Store(Protocol):
    """Where finished chunks are kept."""

    def load(self, index: int) -> Any | None:
        """The values of a chunk, or None."""

    def save(self, index: int, values: Any) -> None:
        """Keep the values of a chunk."""


@dataclass(frozen=True)
class EnsembleRun:
    """A setting, the schemes to compare, and how the runs are cut into chunks.

    The numbers depend on the seed, the chunk size, the precision and the kind of device, and on nothing else: not on where the
    job was interrupted.
    """

    setting: Ensemble
    schemes: tuple[Scheme, ...]
    runs: int
    chunk: int
    precision: str = "float32"
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.runs < 1 or self.chunk < 1:
            raise InputError(f"runs= and chunk= are at least 1, not {self.runs} and {self.chunk}")
        require_known("precision", self.precision, PRECISIONS)
        if not is_elsewhere():
            require_memory(self.memory, self.device)
        check_schemes(self.schemes, self.setting.time, self.setting.times, flow=True)
        for scheme in self.schemes:
            scheme.check_head(self.setting.dim // self.setting.heads)

    @property
    def record(self) -> dict[str, Any]:
        """The job as plain values, for ``run.json`` and to find its finished chunks again."""
        return asdict(self)

    @property
    def kernels(self) -> Kernels:
        """Compiled where the job is long enough on a GPU to earn the compiler's half minute back."""
        worthwhile = self.device.startswith("cuda") and self.runs >= _COMPILED_FROM_CHUNKS * self.chunk
        return _compiled(repr(self)) if worthwhile else PLAIN

    @property
    def summary(self) -> str:
        """One line for people."""
        s = self.setting
        drawn = f"{s.weights} weights" + (f", redrawn every {s.redraw:g}" if s.redraw else "")
        heads = f"{s.heads} head{'s' * (s.heads > 1)}"
        return (
            f"n = {s.tokens}, d = {s.dim}, {heads}, β = {s.beta:.4g}, {drawn}; {self.runs} runs; {s.solver}, "
            f"step {s.step:g}, {self.precision}; seed {self.seed}"
        )

    @property
    def parts(self) -> int:
        """The number of chunks."""
        return -(-self.runs // self.chunk)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes that the job needs at most, about, by the settings that they follow from."""
        s, schemes, chunk = self.setting, len(self.schemes), min(self.chunk, self.runs)
        exact = 4 if self.precision == "float32" else 2
        states = chunk * (15 * schemes * s.tokens * s.dim * 4 + 6 * s.dim**2 * exact)
        cosines = self.runs * s.samples * (8 * schemes + 16)
        return {
            f"chunk={chunk}, tokens={s.tokens}, dim={s.dim}": float(states),
            f"runs={self.runs}, samples={s.samples}": float(cosines + _CHUNK * self.parts),
            f"time={s.time:g}, step={s.step:g}, samples={s.samples}": _STAGE * s.most_evaluations,
        }

    def chunk_size(self, index: int) -> int:
        """Runs in a chunk; the last may be smaller."""
        return min(self.chunk, self.runs - index * self.chunk)

    def compute(self, store: Store, progress: Callable[[int], None] = lambda done: None) -> Cosines:
        """Mean cosines (runs, schemes, samples), chunk by chunk; ``progress`` hears how many runs are done."""
        chunks: list[Cosines] = []
        done = 0
        for index, seed in enumerate(chunk_seeds(self.seed, self.parts)):
            chunks.append(self._chunk(store, index, seed))
            done += self.chunk_size(index)
            progress(done)
        return np.concatenate(chunks)

    def compute_chunk(self, index: int, store: Store) -> None:
        """One chunk, unless it is there already."""
        self._chunk(store, index, chunk_seeds(self.seed, self.parts)[index])

    def _chunk(self, store: Store, index: int, seed: int) -> Cosines:
        values: Cosines | None = store.load(index)
        size = self.chunk_size(index)
        if values is None or values.shape != (size, len(self.schemes), self.setting.samples):
            precision = PRECISIONS[self.precision]
            kernels = self.kernels
            values = run_chunk(self.setting, self.schemes, size, seed, device=self.device, precision=precision, kernels=kernels)
            store.save(index, values)
        return values

    def not_finite(self, cosines: Cosines) -> list[str]:
        """A line for each scheme with runs that became non-finite (NaN/Inf)."""
        return not_finite(self.setting, self.schemes, cosines)

    def table(self, cosines: Cosines) -> pd.DataFrame:
        """Mean and 90 % band for each scheme and time."""
        return summarise(self.setting, self.schemes, cosines)
