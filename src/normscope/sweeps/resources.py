"""How cores and GPUs are shared out among the runs of a sweep."""

from dataclasses import dataclass
from pathlib import Path

import torch

from normscope.core.threads import usable_cores
from normscope.sweeps.local import LocalExecutor, visible_gpus
from normscope.sweeps.on_ray import Needs, RayExecutor
from normscope.sweeps.plan import Plan
from normscope.sweeps.tasks import Executor


@dataclass(frozen=True)
class Resources:
    """What every run gets; the numbers of a run depend on ``threads`` (by rounding), never on ``workers``."""

    workers: int | None
    threads: int
    gpus: tuple[str, ...]
    per_gpu: int | None
    ray: str | None

    @classmethod
    def of(cls, plan: Plan, device: str, workers: int | None, per_gpu: int, cpus: int | None, ray: str | None) -> "Resources":
        """The given numbers, and fair shares of this machine for those that are not given."""
        tasks = sum(max(1, point.experiment.parts) for point in plan.points)
        cores, gpus = usable_cores(), visible_gpus(device)
        threads = cpus or max(1, min(torch.get_num_threads(), cores // tasks))
        if ray is None:
            workers = min(workers or (per_gpu * len(gpus) if gpus else max(1, cores // threads)), tasks)
        return cls(workers, threads, gpus, per_gpu if device.startswith("cuda") else None, ray)

    def executor(self, folder: Path) -> Executor:
        """Worker processes here, or a cluster."""
        if self.ray is not None:
            return RayExecutor(self.ray, Needs(self.threads, self.per_gpu), self.workers, self.gpus)
        return LocalExecutor(folder, self.workers or 1, self.threads, self.gpus)
