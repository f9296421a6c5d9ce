"""The device that a computation runs on."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from normscope.errors import InputError
from normscope.machine.memory import available, installed_memory

_ELSEWHERE = ContextVar("elsewhere", default=False)


@contextmanager
def devices_elsewhere() -> Iterator[None]:
    """Accept any device meanwhile: the computation will run on another machine."""
    before = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(before)


def is_elsewhere() -> bool:
    """Whether the computation will run on another machine."""
    return _ELSEWHERE.get()


def chosen_device(name: str) -> str:
    """``auto`` resolved to a GPU if there is one; a device that this machine lacks raises ``InputError``."""
    if name == "cpu" or _ELSEWHERE.get():
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        known = torch.device(name).type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise InputError(f"device='{name}' is not available; allowed: auto, cpu{', cuda' * torch.cuda.is_available()}")
    return name


@dataclass(frozen=True)
class DeviceFacts:
    """The device that ``auto`` stands for on this machine.

    Attributes:
        device: ``cuda`` or ``cpu``.
        name: what it is called.
        reason: why it is this one.
        memory, free: bytes that it has, and that a computation can still allocate.
        threads, cores: of the CPU that torch uses, and that this process may use.
    """

    device: str
    name: str
    reason: str
    memory: float
    free: float
    threads: int
    cores: int


def device_facts() -> DeviceFacts:
    """The device of ``auto``, and why it is this one."""
    import torch

    from normscope.core.threads import usable_cores

    device, threads, cores = chosen_device("auto"), torch.get_num_threads(), usable_cores()
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        reason = f"{count} CUDA GPU{'s' * (count > 1)} visible" + ("; auto takes the first" if count > 1 else "")
        return DeviceFacts(device, gpu.name, reason, float(gpu.total_memory), available("cuda:0"), threads, cores)
    return DeviceFacts(device, _processor(), _why_no_gpu(), installed_memory(), available(), threads, cores)


def _why_no_gpu() -> str:
    import torch

    if torch.backends.mps.is_available():
        return "normscope runs on CUDA GPUs and CPUs; the GPU of this Mac (mps) is not used"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"no CUDA GPU is visible to torch (CUDA_VISIBLE_DEVICES='{hidden}')"
    return "no CUDA GPU is visible to torch; nvidia-smi lists the GPUs that the driver finds"


def _processor() -> str:
    """The name of the CPU, where the system reports one; else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
