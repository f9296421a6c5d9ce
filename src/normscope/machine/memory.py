"""Memory: how much is free, and a refusal, before anything is allocated, of what does not fit."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from normscope.errors import InputError
from normscope.machine.files import size_text

MOST_STEPS = 1_000_000
_GROUPS = Path("/sys/fs/cgroup")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Unable to allocate")


def available(device: str = "cpu") -> float:
    """Bytes that this process can still allocate; infinite where the system does not report it."""
    return _free_on_gpu(device) if device.startswith("cuda") else min(_free(), *_free_in_groups(), _free_in_limits())


def installed_memory() -> float:
    """Bytes of memory that the machine has; infinite where the system does not report it."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError):
        return float("inf")


def require_memory(needs: Mapping[str, float], device: str = "cpu") -> None:
    """Refuse a computation that does not fit: ``needs`` are bytes by the settings that they follow from."""
    total = sum(needs.values())
    if total < 1 << 26:  # fits everywhere
        return
    free = available(device)
    if total > free:
        largest = max(needs, key=lambda name: needs[name])
        where = "this machine" if device == "cpu" else device
        raise InputError(
            f"{largest} needs about {size_text(total)} of memory, {where} has {size_text(free)} free: choose smaller numbers"
        )


def require_steps(steps: float, settings: str) -> None:
    """Refuse a computation of more steps than anybody waits for; ``settings`` are those that they follow from."""
    if steps > MOST_STEPS:
        raise InputError(f"{settings}: that is {_count(steps)} steps, at most {MOST_STEPS:,} are computed")


@contextmanager
def out_of_memory_explained() -> Iterator[None]:
    """One clear error where an allocation fails after all."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _NO_MEMORY):
            raise
        cause = " ".join(str(error).split())[:200] or "an allocation failed"
        raise InputError(f"out of memory: {cause}; choose smaller numbers") from error


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e15 else f"{number:.0e}"


def _free() -> float:
    """Of the whole machine: what the kernel reports as available; elsewhere all memory that there is."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        if found:
            return 1024.0 * int(found[1])
    except OSError:
        pass
    return installed_memory()


def _free_in_groups() -> Iterator[float]:
    """Of every control group that this process is in: its limit, less what is used and cannot be reclaimed."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    yield float("inf")
    for line in lines:
        _, kinds, inside = line.split(":", 2)
        if not kinds:
            root, names, cache = _GROUPS, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in kinds.split(","):
            root, names, cache = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"
        else:
            continue
        group = root / inside.strip("/")
        for folder in (group, *(parent for parent in group.parents if parent == root or root in parent.parents)):
            try:
                most, used = (int((folder / name).read_text(encoding="ascii")) for name in names)
                cached = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(encoding="ascii"), re.MULTILINE)
            except (OSError, ValueError):  # no such group here, or "max": no limit
                continue
            yield max(0.0, float(most - used + (int(cached[1]) if cached else 0)))


def _free_in_limits() -> float:
    """Of the process: the limit of its address space (ulimit -v)."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return float("inf")
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        used = 0
    return max(0.0, float(most - used))


def _free_on_gpu(device: str) -> float:
    import torch

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)
