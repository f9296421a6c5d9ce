"""Which alarms come before the loss shows that a training fails, and how often they are false.

    python benchmarks/watch_alarms.py train --out DIR                    # about nine minutes on one H200 with 16 CPU cores
    python benchmarks/watch_alarms.py train --out DIR --small            # a dry run on a CPU: a few runs of 60 steps
    python benchmarks/watch_alarms.py evaluate DIR                       # the half on which rules are set; no GPU needed
    python benchmarks/watch_alarms.py evaluate DIR --half kept-aside     # the half that rules have never seen
    python benchmarks/watch_alarms.py train --fresh --out DIR            # other trainings of the same families

``train`` trains small models of many schemes with settings that people get wrong (learning rate, warm-up, depth, width,
initialisation, precision, weight decay, …) and with settings that work, in a plain PyTorch loop with ``normscope.watch``; the
loss of every step is recorded beside it. Small models train on CPU cores while others use the GPU. Finished runs are skipped,
so that the same command resumes. Everything is collected in ``DIR/watched.zip``. ``evaluate`` replays the recorded probes
through the alarms of ``normscope.watch``.

A run fails or is healthy by its loss alone; U and B are the entropies of the targets and of the targets given the character
before them, m a trailing mean of ten losses:

- it fails if the loss becomes NaN or infinite; if m rises 0.3 above its best and never comes back to within 0.1 of it; or if
  the last fifty losses have a mean above (U + B)/2. The loss shows it at the step at which it becomes non-finite; at which m
  rises 0.3 above its best for the last time; or, for a loss that never falls, at which 95 % of the healthy runs of the task
  are below that bar. The earliest of these counts.
- it is healthy if the last fifty losses have a mean below B and m never rises 1 above its best.
- other runs are unclear; they count for neither.
"""

import argparse
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import pydoc_data.topics
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import normscope as ns
from normscope.core import CausalMask
from normscope.schemes import find_scheme
from normscope.training.tasks import MASK, Addition
from normscope.transformer import Row, Transformer, TransformerConfig
from normscope.watch.alarms import RULES, Alarms
from normscope.watch.snapshot import Snapshot

_TOKENS, _BYTES = 64, 128
_PROBED = {"text": 8, "addition": 32}  # rows of the probe
_AFTER_THE_END = 30  # steps that a run goes on after its loss is no longer finite
_LARGE = 1.5e6  # work of a step, in weights with layers counted four times, above which a GPU trains it
_ARCHIVE = "watched.zip"
_SHOWN, _BACK, _SPIKE, _MEAN, _LAST = 0.3, 0.1, 1.0, 10, 50
_HALVES, _FRESH = ("first", "kept-aside"), "fresh"


@dataclass(frozen=True)
class Run:
    """One training: a model, a task, and how it is trained."""

    family: str
    task: str
    scheme: str
    layers: int = 4
    dim: int = 64
    rate: float = 3e-3
    warmup: int = 50
    schedule: str = "cosine"  # constant; ramp: from rate/1000 to rate, exponentially; jump: 30 times as high for the last 40 %
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    start: float = 1.0  # factor on all initial matrices
    of_scores: float = 1.0  # factor on the learning rate of W_Q, W_K and W_V
    precision: str = "float32"  # autocast: bfloat16 products; bfloat16, float16: of all weights
    seed: int = 0

    @property
    def name(self) -> str:
        """Family, task, scheme and seed, which no two runs share."""
        return f"{self.family}_{self.task}_{self.scheme}_{self.seed}"

    @property
    def work(self) -> float:
        """How long a step takes, in units of no meaning."""
        return self.layers * (12 * self.dim**2 + 50_000)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step."""
        share = step / steps
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        factors: dict[str, float] = {
            "cosine": 0.55 + 0.45 * math.cos(math.pi * share),
            "constant": 1.0,
            "ramp": math.pow(1000, share - 1),
            "jump": 30.0 if share >= 0.6 else 1.0,
        }
        return self.rate * warm * factors[self.schedule]


_TASKS = ("text", "addition")
_SOUND = ("pre", "peri", "qk", "ln-scaling", "res-post", "ngpt-lerp", "mix", "pre-qkv")  # trained without much care
_ALL = (*_SOUND, "post", "deepnorm", "hybrid", "hybrid-star", "qkv", "sqrt-scaling", "none")


def grid(fresh: bool = False) -> list[Run]:
    """All runs. Whether one fails is known when its loss is.

    Fresh ones are others of the same families: the other task for each scheme, another seed, and learning rates that differ by
    a factor between 1/2 and 2, which a hash of the name chooses.
    """
    runs: list[Run] = []

    def add(family: str, schemes: tuple[str, ...], tasks: tuple[str, ...] = _TASKS, seeds: int = 1, **changes: Any) -> None:
        """A run for each scheme and task; with ``either``, tasks take turns from scheme to scheme."""
        for index, scheme in enumerate(schemes):
            for task in (_TASKS[(index + fresh) % 2],) if tasks == ("either",) else tasks:
                runs.extend(Run(family, task, scheme, seed=seed + 100 * fresh, **changes) for seed in range(seeds))

    either = ("either",)
    add("plain", _ALL)
    add("plain-low-rate", _SOUND, either, rate=1e-3)
    add(
        "plain-constant",
        ("pre", "peri", "qk", "ln-scaling", "res-post", "mix"),
        either,
        rate=1e-3,
        schedule="constant",
        clip=0.0,
    )
    add("plain-higher-rate", _SOUND, either, rate=1e-2)
    add("plain-deep", ("peri", "qk", "ln-scaling", "pre", "ngpt-lerp", "res-post"), either, layers=12, rate=1e-3)
    add("plain-wide", ("pre", "peri", "qk", "ngpt-lerp", "pre-qkv", "ln-scaling"), either, dim=256, rate=1e-3)
    add("plain-autocast", ("qk", "pre", "peri", "res-post"), either, precision="autocast")
    add("plain-seed", ("pre", "peri", "qk", "mix"), either, seeds=2, rate=2e-3, weight_decay=0.1)
    add("plain-ramp", ("pre", "peri", "qk", "ln-scaling"), either, rate=1e-2, schedule="ramp", warmup=0)
    add("high-rate", ("pre", "post", "peri", "none", "qk", "hybrid", "ln-scaling", "mix"), either, rate=1.0, clip=0.0)
    add("no-warmup", ("post", "pre", "mix", "qkv", "res-post", "sqrt-scaling", "pre-qkv", "ln-scaling"), either,
        rate=0.3, warmup=0, clip=0.0, schedule="constant")  # fmt: skip
    add("deep", ("post", "deepnorm", "sqrt-scaling", "hybrid", "none", "mix", "pre"), either, layers=16, rate=1e-2, warmup=0)
    add("deep-post", ("post",), layers=24, rate=1e-3, seeds=2)
    add("wide", ("pre", "post", "qkv", "mix", "none", "res-post"), either, dim=384, rate=0.1, warmup=0, clip=0.0)
    add("late-ramp", (*_SOUND, "qkv", "hybrid-star"), either, rate=10.0, schedule="ramp", warmup=0, clip=0.0)
    add(
        "late-ramp-clipped",
        ("mix", "pre", "qkv", "peri", "hybrid-star", "ln-scaling"),
        either,
        rate=3.0,
        schedule="ramp",
        warmup=0,
    )
    add("late-jump", ("qk", "ln-scaling", "pre", "mix"), either, rate=1e-2, schedule="jump", clip=0.0)
    add("large-start", ("pre", "none", "qkv", "mix", "post", "ln-scaling"), either, start=8.0, rate=3e-2, clip=0.0, warmup=0)
    add("score-rate", ("pre", "mix", "none", "post", "ln-scaling", "res-post"), either, of_scores=100.0, rate=1e-2, clip=0.0)
    add("float16", ("pre", "qk"), either, precision="float16")
    add("float16-eps", ("peri", "mix", "res-post", "none"), either, precision="float16", eps=1e-4, rate=3e-2, clip=0.0)
    add("bfloat16", ("pre", "qkv", "peri", "mix"), either, precision="bfloat16", rate=1e-1, clip=0.0)
    add("decay", ("peri", "pre", "qk", "mix"), either, weight_decay=10.0, rate=1e-2)
    add("momentum", ("pre", "ln-scaling", "qkv", "mix"), either, betas=(0.99, 0.9), rate=3e-2, clip=0.0, warmup=0)
    add("no-rate", ("qk", "pre"), either, rate=1e-6)
    add("long-memory", ("pre", "mix", "res-post", "none"), either, betas=(0.9, 0.9999), rate=3e-2, clip=0.0, warmup=0)
    return [replace(run, rate=run.rate * 2 ** (_hash(run.name) % 2001 / 1000 - 1)) for run in runs] if fresh else runs


@functools.cache
def halved() -> dict[str, str]:
    """The set of every run: halves, in which the runs of a family take turns in the order of a hash, and fresh ones."""
    families: dict[str, list[str]] = {}
    for run in grid():
        families.setdefault(run.family, []).append(run.name)
    halves: dict[str, str] = {}
    for family, names in families.items():
        ordered = sorted(names, key=_hash)
        first = _hash(family) % 2  # which half gets the odd one out
        halves |= {name: _HALVES[(index + first) % 2] for index, name in enumerate(ordered)}
    return {**halves, **{run.name: _FRESH for run in grid(fresh=True)}}


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


@functools.cache
def text() -> Tensor:
    """The documentation of Python that every Python has, as bytes below 128."""
    topics = pydoc_data.topics.topics
    return torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode())).clamp(max=_BYTES - 1)


_SUMS = Addition((2,), (1, 2))


class Batches:
    """Batches of a task from a seed: characters, and targets with MASK or −1 where there is none."""

    def __init__(self, task: str, seed: int, rows: int | None = None) -> None:
        self.task, self.generator = task, torch.Generator().manual_seed(seed)
        self.rows = rows or {"text": 16, "addition": 64}[task]

    def draw(self) -> tuple[Tensor, Tensor]:
        """One batch, (rows, tokens) both."""
        if self.task == "addition":
            examples = _SUMS.draw(self.rows, self.generator)
            return examples.inputs, torch.where(examples.targets == MASK, -1, examples.targets)
        begins = torch.randint(len(text()) - _TOKENS, (self.rows, 1), generator=self.generator)
        rows = text()[begins + torch.arange(_TOKENS + 1)]
        return rows[:, :-1], rows[:, 1:]


def probe_of(task: str) -> Tensor:
    """Rows without padding: text, or sums whose length is the commonest."""
    if task == "text":
        return Batches(task, 1_000_003, _PROBED[task]).draw()[0]
    characters, _ = Batches(task, 1_000_003, 2000).draw()
    lengths = (characters != MASK).sum(1)
    common = lengths.bincount().argmax()
    return characters[lengths == common][: _PROBED[task], :common]


@functools.cache
def entropies(task: str) -> tuple[float, float]:
    """In nats: of targets, and of targets given the character before them."""
    characters, targets = Batches(task, 1_000_033, 20_000).draw()
    wanted = targets >= 0
    pairs = torch.zeros(_BYTES, _BYTES, dtype=torch.float64)
    pairs.index_put_((characters[wanted], targets[wanted]), torch.ones((), dtype=torch.float64), accumulate=True)
    pairs /= pairs.sum()
    single = -torch.special.xlogy(pairs.sum(0), pairs.sum(0)).sum()
    given = torch.special.xlogy(pairs.sum(1), pairs.sum(1)).sum() - torch.special.xlogy(pairs, pairs).sum()
    return float(single), float(given)


def build(run: Run, device: str) -> Transformer:
    """The model of a run, before its first step."""
    torch.manual_seed(run.seed)
    config = TransformerConfig(
        find_scheme(run.scheme), _BYTES if run.task == "text" else 17, run.dim, run.layers, heads=4, head=run.dim // 4,
        feedforward=4 * run.dim, readout=(), frequencies=16,
    )  # fmt: skip
    model = Transformer(config)
    with torch.no_grad():
        for module in model.modules_with_matrices():
            for weight, _ in module.matrices():
                weight.mul_(run.start)
    model.renormalise()
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(run.precision, torch.float32)
    return model.to(device, dtype)


def train(run: Run, folder: Path, steps: int, every: int, device: str, until: float = math.inf) -> bool:
    """Train and watch one model in ``folder``; whether it came to its end before the time ``until``."""
    began, model = time.monotonic(), build(run, device)
    scores = [p for name, p in model.named_parameters() if name.endswith("W_QKV")]
    others = [p for name, p in model.named_parameters() if not name.endswith("W_QKV")]
    groups = [{"params": others, "factor": 1.0}, {"params": scores, "factor": run.of_scores}]
    optimizer = torch.optim.AdamW(groups, lr=run.rate, betas=run.betas, eps=run.eps, weight_decay=run.weight_decay, fused=True)
    batches, losses, ended = Batches(run.task, run.seed), [], steps
    watch = ns.watch(model, probe=probe_of(run.task).to(device), every=every, rows=None, alarms=())
    with watch:
        for step in range(steps):
            characters, targets = (x.to(device) for x in batches.draw())
            positions = torch.arange(characters.shape[1], device=device).expand_as(characters)
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=run.precision == "autocast"):
                logits = model(Row(characters, positions, CausalMask()))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
            for group in optimizer.param_groups:
                group["lr"] = run.rate_at(step, steps) * group["factor"]
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if run.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            model.renormalise()
            watch.step(loss=loss)
            losses.append(loss.detach())
            if (step + 1) % every == 0:
                if time.monotonic() > until:
                    return False
                if ended == steps and not math.isfinite(float(loss.detach())):
                    ended = step + _AFTER_THE_END
            if step >= ended:
                break
    for name, table in watch.tables.items():
        table.to_parquet(folder / f"{name}.parquet", index=False)
    np.save(folder / "losses.npy", torch.stack(losses).float().cpu().numpy())
    about = {**asdict(run), "steps": steps, "every": every, "device": device, "seconds": time.monotonic() - began}
    (folder / "run.json").write_text(json.dumps(about))
    return True


def finished(folder: Path) -> bool:
    """Whether a run is complete."""
    return (folder / "run.json").exists()


def work(runs: list[Run], folder: Path, steps: int, every: int, device: str, until: float) -> None:
    """Train, one after another, the runs that no other process has claimed, until the time is up."""
    torch.set_num_threads(1)
    pace = 0.0  # seconds for a unit of work
    for run in runs:
        place, began = folder / run.name, time.monotonic()
        if finished(place) or began + pace * run.work > until or not claimed(place):
            continue
        place.mkdir(exist_ok=True)
        try:
            if not train(run, place, steps, every, device, until):
                return
        except Exception as error:  # one broken run must not cost all others; it is counted in the end
            (place / "error.txt").write_text(f"{type(error).__name__}: {error}")
            print(f"{run.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        pace = max(pace, (time.monotonic() - began) / run.work)
        print(f"{run.name} on {device}: {time.monotonic() - began:.0f} s", flush=True)


def claimed(place: Path) -> bool:
    """Take a run for this process; False if another has it."""
    try:
        os.close(os.open(place.with_suffix(".claim"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def train_all(out: Path, steps: int, every: int, processes: int, on_gpu: int, seconds: float, runs: list[Run]) -> None:
    """Train all runs in parallel and collect them."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    for claim in folder.glob("*.claim"):
        claim.unlink()
    until = time.monotonic() + seconds
    by_size = sorted(runs, key=lambda run: (run.work, _hash(run.name)))
    small = [run for run in by_size if run.work < _LARGE and run.precision != "float16"] if on_gpu else by_size
    context = multiprocessing.get_context("spawn")
    workers = [(by_size[::-1], "cuda")] * on_gpu + [(small, "cpu")] * (processes - on_gpu)
    started = [context.Process(target=work, args=(mine, folder, steps, every, device, until)) for mine, device in workers]
    for process in started:
        process.start()
    for process in started:
        process.join()
    done = [run for run in runs if finished(folder / run.name)]
    print(f"{len(done)} of {len(runs)} runs are complete")
    collect(out, done)


def collect(out: Path, runs: list[Run]) -> None:
    """All tables of all runs in one archive, with numbers of three digits."""
    tables: dict[str, list[pd.DataFrame]] = {}
    for run in runs:
        folder = out / "runs" / run.name
        losses = np.load(folder / "losses.npy")
        tables.setdefault("losses", []).append(
            pd.DataFrame({"run": run.name, "step": np.arange(1, len(losses) + 1), "loss": losses})
        )
        about = json.loads((folder / "run.json").read_text())
        tables.setdefault("runs", []).append(pd.DataFrame([{"run": run.name, **about, "betas": str(about["betas"])}]))
        for path in folder.glob("*.parquet"):
            tables.setdefault(path.stem, []).append(pd.read_parquet(path).assign(run=run.name))
    with zipfile.ZipFile(out / _ARCHIVE, "w") as archive:
        for name, frames in tables.items():
            table = pd.concat(frames, ignore_index=True)
            content = io.BytesIO()
            _compact(table).to_parquet(content, compression="zstd", index=False)
            archive.writestr(f"{name}.parquet", content.getvalue())
    print(f"{out / _ARCHIVE}: {(out / _ARCHIVE).stat().st_size / 2**20:.1f} MiB")


def _compact(table: pd.DataFrame) -> pd.DataFrame:
    """Floats as float32 with twelve of their bits cut off, text as categories."""
    columns: dict[Any, pd.Series[Any]] = {}
    for name, column in table.items():
        if column.dtype.kind == "f":
            bits = column.to_numpy(np.float32).view(np.uint32)
            columns[name] = pd.Series((bits & np.uint32(0xFFFFF000)).view(np.float32), column.index)
        else:
            columns[name] = column.astype("category") if column.dtype.kind not in "iub" else column
    return pd.DataFrame(columns)


@dataclass(frozen=True)
class Outcome:
    """What the loss says of a run: ``failing``, ``healthy`` or ``unclear``, and from which step on it shows a failure."""

    label: str
    how: str = ""
    step: float = math.nan


def trailing_means(losses: np.ndarray) -> np.ndarray:
    """Means over the last ten losses, or all so far; infinite from the first loss on that is no number."""
    broken = np.flatnonzero(~np.isfinite(losses))
    sound = losses[: broken[0]] if len(broken) else losses
    means = pd.Series(sound, dtype=np.float64).rolling(_MEAN, min_periods=1).mean().to_numpy()
    return np.concatenate([means, np.full(len(losses) - len(sound), math.inf)])


def departure(means: np.ndarray) -> int | None:
    """The step at which the loss left its best for the last time, if it did not come back."""
    best = np.minimum.accumulate(means)
    near = np.flatnonzero(means <= best + _BACK)
    rest = means[near[-1] + 1 :] - best[near[-1] + 1 :]
    above = np.flatnonzero(rest > _SHOWN)
    return int(near[-1] + 1 + above[0]) + 1 if len(above) else None


def outcomes(losses: dict[str, np.ndarray], tasks: dict[str, str]) -> dict[str, Outcome]:
    """The outcome of every run, by the rules at the top of this file."""
    found: dict[str, Outcome] = {}
    passed: dict[str, list[int]] = {}
    never: list[str] = []
    for name, values in losses.items():
        single, given = entropies(tasks[name])
        bar, means = (single + given) / 2, trailing_means(values)
        last = float(values[-_LAST:].mean())
        left = departure(means)
        if left is not None or not math.isfinite(last):
            shown = left if left is not None else int(np.flatnonzero(~np.isfinite(values))[0]) + 1
            found[name] = Outcome("failing", "non-finite" if not np.isfinite(values).all() else "diverged", shown)
        elif last > bar:
            never.append(name)
        elif last < given and (means - np.minimum.accumulate(means)).max() < _SPIKE:
            found[name] = Outcome("healthy")
            passed.setdefault(tasks[name], []).append(int(np.flatnonzero(means <= bar)[0]) + 1)
        else:
            found[name] = Outcome("unclear")
    for name in never:
        steps = passed.get(tasks[name])
        found[name] = Outcome("failing", "never learns", float(np.quantile(steps, 0.95)) if steps else len(losses[name]))
    return found


def snapshots(tables: dict[str, pd.DataFrame]) -> Iterator[Snapshot]:
    """The probes of one run, in order."""
    by_step = {name: {int(str(step)): rows for step, rows in table.groupby("step")} for name, table in tables.items()}
    for step in sorted({step for groups in by_step.values() for step in groups}):
        yield Snapshot(step, {name: groups[step] for name, groups in by_step.items() if step in groups})


def read(out: Path, half: str | None) -> tuple[pd.DataFrame, dict[str, np.ndarray], dict[str, dict[str, pd.DataFrame]]]:
    """Runs, losses by run, and watched tables by run: of one half, or of all."""
    with zipfile.ZipFile(out / _ARCHIVE) as archive:
        tables = {Path(name).stem: pd.read_parquet(io.BytesIO(archive.read(name))) for name in archive.namelist()}
    runs = tables.pop("runs").set_index("run", drop=False)
    losses = {str(run): table["loss"].to_numpy() for run, table in tables.pop("losses").groupby("run", observed=True)}
    wanted = {name for name in runs.index if half is None or halved()[name] == half}
    watched: dict[str, dict[str, pd.DataFrame]] = {name: {} for name in wanted}
    for name, table in tables.items():
        for run, rows in table.groupby("run", observed=True):
            if run in wanted:
                watched[str(run)][name] = rows.drop(columns="run")
    return runs, losses, watched


def replay(out: Path, half: str | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The outcome of every run of a half, and the alarms that its probes raise."""
    runs, losses, watched = read(out, half)
    tasks = {str(name): str(task) for name, task in runs["task"].items()}
    known = outcomes(losses, tasks)  # from all runs: of the kept-aside ones losses alone are used
    rows = [
        {"run": name, "scheme": runs.loc[name, "scheme"], "task": tasks[name], "half": halved()[name], **asdict(known[name])}
        for name in sorted(watched)
    ]
    alarms = []
    for name, tables in sorted(watched.items()):
        guard = Alarms(dim=int(str(runs.loc[name, "dim"])))
        for snapshot in snapshots({key: table for key, table in tables.items() if key != "alarms"}):
            alarms += [{"run": name, **asdict(alarm)} for alarm in guard.add(snapshot)]
    columns = ["run", "step", "rule", "layer", "head", "number", "text", "severity"]
    return pd.DataFrame(rows), pd.DataFrame(alarms, columns=columns)


def table_of_rules(runs: pd.DataFrame, alarms: pd.DataFrame) -> pd.DataFrame:
    """For every rule, and for all warnings together: failing runs flagged, steps ahead of the loss, healthy runs flagged."""
    severity = {rule.name: rule.severity for rule in RULES}
    kinds = [
        ("all warnings", [name for name in severity if severity[name] == "warning"]),
        *((name, [name]) for name in severity),
    ]
    failing, healthy, unclear = (runs[runs["label"] == label] for label in ("failing", "healthy", "unclear"))
    rows = []
    for title, names in kinds:
        first = alarms[alarms["rule"].isin(names)].groupby("run")["step"].min()
        ahead = (failing.set_index("run")["step"] - first).dropna()
        before = ahead[ahead > 0]
        low, middle, high = before.quantile([0.25, 0.5, 0.75]) if len(before) else (math.nan,) * 3

        def share(flagged: int, of: pd.DataFrame) -> str:
            return f"{flagged} of {len(of)} ({flagged / max(len(of), 1):.0%})"

        rows.append(
            {
                "rule": title,
                "severity": severity.get(title, ""),
                "failing, flagged before the loss shows it": share(len(before), failing),
                "at all": len(ahead),
                "steps ahead: median (quartiles)": f"{middle:.0f} ({low:.0f} – {high:.0f})" if len(before) else "–",
                "healthy, flagged": share(int(healthy["run"].isin(first.index).sum()), healthy),
                "unclear, flagged": share(int(unclear["run"].isin(first.index).sum()), unclear),
            }
        )
    return pd.DataFrame(rows)


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def evaluate(out: Path, half: str | None) -> None:
    """Print what became of the runs and the table of rules, and write outcomes and first warnings."""
    runs, alarms = replay(out, half)
    print(f"{len(runs)} runs of {runs['scheme'].nunique()} schemes, {half or 'both halves'}\n")
    groups = runs.groupby(["label", "how"])["step"]
    counts = pd.DataFrame({"runs": groups.size(), "earliest": groups.min(), "latest": groups.max()}).reset_index()
    print(markdown(counts), "\n")
    print(markdown(table_of_rules(runs, alarms)))
    warnings = alarms[alarms["severity"] == "warning"].sort_values("step").groupby("run").first()[["step", "rule"]]
    joined = runs.join(warnings.rename(columns={"step": "warned", "rule": "by"}), on="run")
    joined.to_csv(out / f"outcomes-{half or 'both'}.csv", index=False)
    alarms.to_csv(out / f"alarms-{half or 'both'}.csv", index=False)


def main() -> None:
    """Train, or evaluate what was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train and watch all runs")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--steps", type=int, default=1000)
    training.add_argument("--every", type=int, default=10)
    training.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    training.add_argument("--gpu-processes", type=int, default=8, help="processes that use the GPU, if there is one")
    training.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which runs are stopped")
    training.add_argument("--fresh", action="store_true", help="other runs of the same families")
    training.add_argument("--only", default="", help="only runs whose name contains this")
    training.add_argument("--small", action="store_true", help="a few runs of 60 steps")
    evaluation = commands.add_parser("evaluate", help="replay the probes through the alarms")
    evaluation.add_argument("out", type=Path)
    evaluation.add_argument("--half", choices=(*_HALVES, "both", _FRESH), default="first")
    chosen = parser.parse_args()
    if chosen.command == "evaluate":
        evaluate(chosen.out, None if chosen.half == "both" else chosen.half)
        return
    runs = [run for run in grid(chosen.fresh) if chosen.only in run.name]
    if chosen.small:
        runs = [replace(run, layers=min(run.layers, 3), dim=32) for run in runs[::20]]
    on_gpu = min(chosen.gpu_processes, chosen.processes) if torch.cuda.is_available() else 0
    steps = 60 if chosen.small else chosen.steps
    train_all(chosen.out, steps, chosen.every, chosen.processes, on_gpu, chosen.time_limit, runs)


if __name__ == "__main__":
    main()
