"""Speed of simulations and ensembles, as ratios taken in one run.

    python benchmarks/dynamics.py [--large] [--runs 2048] [--out FILE.json]

On a CPU: a step at 8,192 tokens against the bare attention call. On a GPU: the card's matrix rate, a step at 65,536 tokens
against the version that builds the tokens × tokens matrix, with --large a step at 1,048,576 tokens against the bare call on
every backend, panel 5a for six schemes as a share of the matrix rate, and with --projections the time of 100,000 runs of every
panel.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.core import Attention
from normscope.dynamics.ensemble import PANELS, PLAIN, Ensemble, Kernels, run_chunk
from normscope.dynamics.motion import Motion
from normscope.dynamics.starts import make_start
from normscope.schemes import NAMED

SIX = [NAMED[name] for name in ("post", "pre", "mix", "peri", "ngpt", "sqrt-scaling")]
GPU_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Median wall time of a call after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Median wall times of several calls that take turns, so that a noisy machine treats them alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds_once(call, device))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds_once(call: Callable[[], Any], device: str) -> float:
    """Wall time of one call."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def matrix_rate() -> float:
    """TFLOP/s of an 8192³ bfloat16 product of random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda: a @ b, 20, "cuda") / 1e12


def step_of(name: str, x: Tensor, precision: torch.dtype | None) -> Callable[[], Tensor]:
    """One layer of a scheme on these tokens: one attention call and everything around it."""
    motion = Motion(NAMED[name], Attention(5.0, precision=precision), depth=20.0)
    return lambda: motion.layer(x, 0.0)


def cpu_step() -> list[dict[str, Any]]:
    """A step at n = 8192, d = 64 in float32 against the bare call."""
    x = make_start("uniform", 8192, 64, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    bare = x[None, None]
    calls: dict[str, Callable[[], Any]] = {
        "bare call": lambda: F.scaled_dot_product_attention(bare, bare, bare, scale=5.0),
        **{scheme.name: step_of(scheme.name, x, None) for scheme in SIX},
    }
    times = interleaved(calls, 15, "cpu")
    return [
        {"what": f"CPU step, n = 8192, d = 64, {name}", "ratio": times[name] / times["bare call"], "limit": "at most 1.25"}
        for name in times
        if name != "bare call"
    ]


def plain_step() -> list[dict[str, Any]]:
    """N = 65,536, d = 128: our step against the plain one that builds the n × n matrix."""
    x = make_start("uniform", 65_536, 128, dtype=torch.float32, device="cuda", generator=_generator())
    y = x.to(torch.bfloat16)

    def plain(z: Tensor) -> Tensor:
        return F.normalize(x + (torch.softmax(5.0 * (z @ z.T), -1) @ z).float(), dim=-1)

    calls: dict[str, Callable[[], Any]] = {"float32": lambda: plain(x), "bfloat16": lambda: plain(y)}
    times = interleaved({"ours": step_of("post", x, torch.bfloat16), **calls}, 5, "cuda")
    return [
        {
            "what": f"plain step in {name} / ours, n = 65,536, d = 128, post",
            "ratio": times[name] / times["ours"],
            "limit": "at least 5",
        }
        for name in calls
    ]


def large_step() -> list[dict[str, Any]]:
    """N = 1,048,576, d = 128, bfloat16 products: steps against the bare call on the fastest backend."""
    x = make_start("uniform", 1 << 20, 128, dtype=torch.float32, device="cuda", generator=_generator())
    y = x.to(torch.bfloat16)[None, None]
    rows, bare = [], {}
    for backend in GPU_BACKENDS:
        with sdpa_kernel(backend):
            bare[backend.name] = seconds(lambda: F.scaled_dot_product_attention(y, y, y, scale=5.0), 1, "cuda")
        flops = 4 * float(1 << 40) * 128
        rows.append({"what": f"bare call, n = 1,048,576, {backend.name}, TFLOP/s", "ratio": flops / bare[backend.name] / 1e12})
    torch.cuda.reset_peak_memory_stats()
    for name in ("post", "peri"):
        taken = seconds(step_of(name, x, torch.bfloat16), 2, "cuda")
        rows.append(
            {"what": f"GPU step, n = 1,048,576, d = 128, {name}", "ratio": taken / min(bare.values()), "limit": "at most 1.10"}
        )
    state = x.numel() * x.element_size()
    rows.append({"what": "its peak memory, in states (n·d float32)", "ratio": torch.cuda.max_memory_allocated() / state})
    return rows


def ensemble_rate(rate: float, runs: int, chunk: int) -> list[dict[str, Any]]:
    """Panel 5a, six schemes: FLOP as the model is written and as executed, against the card's matrix rate."""
    setting, rows = PANELS["5a"], []
    for label, kernels in (("eager", PLAIN), ("compiled", Kernels.compiled())):
        taken = chunk_seconds(setting, chunk, kernels, runs // chunk)
        written = chunk * flops(setting) / taken / 1e12
        executed = written * executed_share(setting)
        rows += [
            {"what": f"panel 5a, {label}, runs/s", "ratio": chunk / taken},
            {"what": f"panel 5a, {label}, FLOP as written / matrix rate", "ratio": written / rate, "limit": "at least 0.40"},
            {"what": f"panel 5a, {label}, FLOP executed / matrix rate", "ratio": executed / rate},
        ]
    return rows


def flops(setting: Ensemble) -> int:
    """Matrix FLOP of one run as the model is written: x W_Q, x W_K, x W_V, q kᵀ, attention · v, · W_O."""
    n, d = setting.tokens, setting.dim
    return setting.evaluations * len(SIX) * (4 * 2 * n * d * d + 2 * 2 * n * n * d)


def executed_share(setting: Ensemble) -> float:
    """Executed FLOP over those of the model as written: folding leaves two of its four products with weights."""
    n, d = setting.tokens, setting.dim
    fold = 2 * 2 * d**3 / flops(setting)
    return (2 * 2 * n * d * d + 4 * n * n * d) / (4 * 2 * n * d * d + 4 * n * n * d) + fold


def chunk_seconds(setting: Ensemble, chunk: int, kernels: Kernels, repeats: int) -> float:
    """Median time of a whole chunk, random draws included."""

    def run() -> Any:
        return run_chunk(setting, SIX, chunk, 0, device="cuda", precision=torch.bfloat16, kernels=kernels)

    return seconds(run, max(repeats, 1), "cuda")


def projections(chunk: int) -> list[dict[str, Any]]:
    """Minutes that 100,000 runs of each panel take, from a tenth of its time."""
    rows: list[dict[str, Any]] = []
    for panel in ("5a", "5b", "5c", "5d", "5e", "5f", "5g"):
        torch.compiler.reset()  # every panel has shapes of its own, and the compiler keeps only so many
        setting = PANELS[panel]
        short = replace(setting, time=setting.time / 10, samples=11)
        size = chunk * 4 if setting.dim <= 128 else chunk
        taken = chunk_seconds(short, size, Kernels.compiled(), 2) * setting.evaluations / short.evaluations
        rows.append({"what": f"panel {panel}, 100,000 runs, minutes", "ratio": taken * 1e5 / size / 60})
    return [*rows, {"what": "all seven panels, minutes", "ratio": math.fsum(row["ratio"] for row in rows)}]


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure what this machine can show and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also the step with a million tokens (needs a large GPU)")
    parser.add_argument("--runs", type=int, default=1024, help="runs of panel 5a to time")
    parser.add_argument("--chunk", type=int, default=256, help="runs computed together")
    parser.add_argument("--projections", action="store_true", help="also the projected time of all panels")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    with torch.no_grad():
        rows = measure(options)
    for row in rows:
        print(f"{row['what']:<70} {row['ratio']:10.3f}   {row.get('limit', '')}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2, ensure_ascii=False))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows for this machine."""
    if not torch.cuda.is_available():
        return cpu_step()
    rate = matrix_rate()
    rows: list[dict[str, Any]] = [{"what": f"{torch.cuda.get_device_name()}, bfloat16 matrix rate, TFLOP/s", "ratio": rate}]
    rows += plain_step()
    rows += large_step() if options.large else []
    rows += ensemble_rate(rate, options.runs, options.chunk)
    return rows + (projections(options.chunk) if options.projections else [])


if __name__ == "__main__":
    main()
