"""How cores and GPUs are shared out among the runs of a sweep."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from normscope.sweeps.execute import Executor
from normscope.sweeps.local import LocalExecutor, visible_gpus
from normscope.sweeps.on_ray import RayExecutor
from normscope.sweeps.plan import Sweep
from normscope.sweeps.ray_process import Needs


@dataclass
class Shares:
    """How cores and GPUs are shared out: numbers do not depend on ``workers``, as ``threads`` does not."""

    workers: int | None
    threads: int
    gpus: tuple[str, ...]
    per_gpu: int
    device: str
    cpus: int | None
    ray: str | None

    @classmethod
    def of(cls, wanted: Sweep, device: str, workers: int | None, per_gpu: int, cpus: int | None, ray: str | None) -> "Shares":
        """The shares on this machine, with what was asked for in the place of what would be fair."""
        tasks = sum(max(1, point.job.parts) for point in wanted.points)
        cores, gpus = len(os.sched_getaffinity(0)), visible_gpus(device)
        threads = cpus or max(1, min(torch.get_num_threads(), cores // tasks))
        if ray is None:
            workers = min(workers or (per_gpu * len(gpus) if gpus else max(1, cores // threads)), tasks)
        return cls(workers, threads, gpus, per_gpu, device.partition(":")[0], cpus, ray)

    def executor(self, folder: Path) -> Executor:
        """Worker processes here, or a cluster."""
        if self.ray is None:
            assert self.workers is not None
            return LocalExecutor(folder, self.workers, self.threads, self.gpus)
        needs = Needs(self.threads, self.per_gpu if self.device == "cuda" else None)
        return RayExecutor(folder, self.ray, needs, self.workers, self.gpus)
