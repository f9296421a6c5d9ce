"""Watch: a fixed probe batch goes through a model every so many steps of its training, and what it shows is kept."""

import atexit
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any, Self

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscope import __version__
from normscope.errors import InputError
from normscope.models import Model, Observer
from normscope.models.describe import scheme_text, view_text
from normscope.models.precision import casts_forgotten, exactly
from normscope.results.conventions import NOISE
from normscope.watch.alarms import Alarm, Alarms, Rule
from normscope.watch.destinations import Destination, destination_of, last_step
from normscope.watch.packed import Packed, Sent, take_part
from normscope.watch.probe_batch import open_with, sample_of
from normscope.watch.snapshot import TABLES, Snapshot
from normscope.watch.statistics import SparseRows, Statistics, collapse_of, faults_only
from normscope.watch.weights import OUTSIDE, Weights

log = logging.getLogger("normscope.watch")
_ROWS, _TOKENS = 4, 512
_PROCESSES = "processes"  # how many took part in a probe
_RESERVED = {"step", "seconds", "probe_seconds", "gradient", _PROCESSES}


class Watch:
    """Live measures of a model while somebody's loop trains it.

    Every ``every`` steps the probe goes through the model, eager, without gradients, with hooks that exist only for that pass.
    Weights, gradients, modes, buffers and random generators stay as they are.

    Example:
        >>> import normscope as ns, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model, batch = LlamaForCausalLM(LlamaConfig(**sizes)), torch.randint(32, (4, 16))
        >>> optimizer, seen = torch.optim.AdamW(model.parameters()), []
        >>> watch = ns.watch(model, probe=batch, every=2, to=seen.append)
        >>> for _ in range(4):
        ...     loss = model(batch, labels=batch).loss
        ...     optimizer.zero_grad(); loss.backward(); optimizer.step()
        ...     watch.step(loss=loss)
        >>> [snapshot.step for snapshot in seen], list(seen[0].tables)
        ([1, 2, 4], ['steps', 'layers', 'sublayers', 'heads', 'norms'])

    Args:
        model: any module with a list of residual blocks, compiled or wrapped for several processes or not.
        probe: a batch of the training: token ids or features, a mapping with them, or a tuple that begins with one.
        every: steps between two probes; step 1 is probed, too.
        to: where snapshots go: a run folder, ``tensorboard``, ``wandb``, ``mlflow``, a writer of theirs, a function that takes
            a ``Snapshot``, or a list of those. By default they are kept in memory, in ``tables``.
        rows, tokens: how much of the probe is read: rows, and tokens of each; None for all.
        noise: the RMS noise of the collapse probability.
        alarms: the rules that are applied, by default ``normscope.watch.RULES``; () for none.
        on_alarm: called with every alarm, which is also logged.
        resume: whether a run folder may be continued.
        start: the number of steps that were taken before; by default 0, or the last step in the run folder that is resumed.
        stream, blocks, example: as for ``open``.
        group: the processes that train together; all by default. Each of them makes the watch and calls ``step``.

    Raises:
        InputError: if no blocks are found, the probe is on another device, or a destination cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        every: int = 100,
        to: Any = None,
        *,
        rows: int | None = _ROWS,
        tokens: int | None = _TOKENS,
        noise: float = NOISE,
        alarms: Iterable[Rule] | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
        resume: bool = False,
        start: int | None = None,
        stream: str | None = None,
        blocks: str | None = None,
        example: Tensor | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        _check_numbers(every=every, rows=1 if rows is None else rows, tokens=1 if tokens is None else tokens)
        _check_numbers(0, start=0 if start is None else start)
        if on_alarm is not None and not callable(on_alarm):
            raise InputError(f"on_alarm={on_alarm!r}: give a function that takes an alarm")
        if not 0 <= noise < 1:
            raise InputError(f"noise={noise}: give an RMS noise of at least 0 and below 1")
        self.every, self.noise, self.on_alarm = every, noise, on_alarm
        self.group, self.ranks = group, dist.get_world_size(group) if _in_team() else 1
        self.first = self.ranks == 1 or dist.get_rank(group) == 0
        self.model: Model = open_with(model, probe, example, stream=stream, blocks=blocks)
        self.weights = Weights(self.model, self.ranks)
        memory = _Memory()
        self.alarms, self.tables = Alarms(alarms, self.model.dim), memory.tables
        self._began, self._closed, self._gradients_of, self._probed = time.monotonic(), False, -1, -1
        self._warned = set[str]()
        self._size, self._pending = 0, list[_Pending]()
        self._destination: Destination | None = None
        self.steps, refused = 0, None
        try:
            self.sample = sample_of(self.model, probe, rows, tokens)
            if self.first:
                self.steps = start if start is not None else last_step(to) if resume else 0
                self._destination = destination_of(memory if to is None or to == [] else to, resume=resume)
                self._destination.begin(self._about())
                atexit.register(_close, weakref.ref(self))
        except InputError as error:
            refused = error
        self._agree(refused)
        self.statistics = Statistics(self.model, self.sample)

    def _agree(self, refused: InputError | None) -> None:
        """Raise the error of any process on all of them, so that none waits for one that has ended; count from one step."""
        reasons = [None if refused is None else str(refused)]
        if self.ranks > 1:
            every: list[Any] = [None] * self.ranks
            dist.all_gather_object(every, (reasons[0], self.steps), group=self.group)
            reasons, self.steps = [reason for reason, _ in every], every[0][1]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            raise refused or InputError(reason)

    def due(self, step: int) -> bool:
        """Whether the model is probed after this step; the first of a training is 1."""
        return not self._closed and (step == 1 or step % self.every == 0)

    def gradients(self, step: int | None = None) -> None:
        """Read the gradients of the step that is about to end, if it is probed: for loops that clear them before ``step``.

        ``step`` is its number, where the loop has one.
        """
        step = self.steps + 1 if step is None else step
        if self.due(step):
            self._gradients_of = step
            try:
                self.weights.keep_gradients()
            except Exception as error:  # as in ``step``
                self._warn(f"could not read the gradients at step {step:,}", error)

    def step(self, loss: Tensor | float | None = None, *, step: int | None = None, **numbers: Tensor | float) -> None:
        """Count a step of the optimiser, and probe the model if it is due.

        On a GPU nothing waits for the numbers of a probe: they are kept at one of the next steps. A probe that fails never
        stops the training: it is reported once, as a warning.

        Args:
            loss: the loss of the step.
            step: the number of the step, where the loop has one; by default they are counted.
            numbers: further numbers to keep with it, such as the learning rate.
        """
        try:
            self.steps = self.steps + 1 if step is None else int(step)
            self._try_to_keep()
            if self.due(self.steps) and self.steps != self._probed:
                self._launch(loss, numbers)
                if self.model.device.type != "cuda":
                    self._try_to_keep()
        except Exception as error:  # whatever a user's model may raise: their training goes on
            self._warn(f"could not probe the model at step {self.steps:,}", error)

    def probe(self, loss: Tensor | float | None = None, **numbers: Tensor | float) -> Snapshot | None:
        """Probe the model now; None on all processes but the first."""
        if self._closed:
            raise InputError("the watch is closed")
        self._keep_pending()
        self._launch(loss, numbers)
        return self._keep_pending()

    @torch.no_grad()
    def _launch(self, loss: Tensor | float | None, numbers: Mapping[str, Any]) -> None:
        """One pass of the probe, whose numbers are then on their way to this process."""
        began, packed, sparse = time.monotonic(), Packed(), list[SparseRows]()
        numbers = self._numbers({} if loss is None else {"loss": loss}, numbers)
        self._probed, failure = self.steps, None
        try:
            if self._gradients_of != self.steps:
                self.weights.keep_gradients()
            self._gradients_of = -1
            for name, value in numbers.items():
                packed.add("steps", name, value, {})
                if name == "loss":
                    packed.add("faults", "count", ~value.isfinite(), {"tensor": name, "layer": OUTSIDE}, "sum")
            sparse = self._pass(packed)
            if self.ranks > 1:
                packed.add("steps", _PROCESSES, torch.ones(()), {}, "count")
                _add_collapse(packed, sparse, self.noise)
                sparse = []
        except Exception as error:  # of the user's model
            failure = error
        if self.ranks > 1:
            self._meet(packed, len(numbers) + ("loss" in numbers), failure)
        if failure is not None:
            raise failure
        sent = packed.sent(self.group, self.ranks)
        self.model.thorough = False  # what this pass has shown need not be asked of the device again
        if self.first:
            self._pending.append(_Pending(self.steps, sent, sparse, time.monotonic() - began))

    def _numbers(self, loss: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the loop gives with a step, as tensors; NaN for what is no number, since other processes may have one."""
        for name in _RESERVED & further.keys():
            self._warn(f"does not record {name}=: this name is reserved; choose another")
        numbers = dict[str, Tensor]()
        kept = {name: value for name, value in further.items() if name not in _RESERVED}  # in one order on every process
        for name, value in {**loss, **kept}.items():
            try:
                numbers[name] = torch.as_tensor(value, dtype=torch.float64).detach().mean()
            except (TypeError, ValueError, RuntimeError) as error:
                self._warn(f"cannot record {name}={value!r}: not a number", error)
                if self.ranks > 1:
                    numbers[name] = torch.full((), torch.nan, dtype=torch.float64)
        return numbers

    def _pass(self, packed: Packed) -> list[SparseRows]:
        """A pass of the probe, to its end whatever is observed: the layers of other processes may wait for those here."""
        failures = list[Exception]()
        with _undisturbed(self.model.model):
            self.model.forward(self.sample, _patient(self.statistics.read(packed), failures))
            with exactly(self.model.device):
                sparse = [] if failures else self.statistics.finish()
                self.weights.read(packed, self.statistics.norms.values())
        if failures:
            raise failures[0]
        return sparse

    def _meet(self, packed: Packed, numbers: int, failure: Exception | None) -> None:
        """Keep other processes from waiting for one whose pass failed.

        In the first probe they ask each other; later this one takes part with as many numbers as there were then.
        """
        size = 0 if failure is not None else packed.size - numbers
        if self._size and failure is not None:
            take_part(self._size + numbers, self.model.device, self.group, self.ranks)
        elif not self._size:
            sizes = [0] * self.ranks
            dist.all_gather_object(sizes, size, group=self.group)
            if len(set(sizes)) > 1 or not size:
                raise failure or _ElsewhereError("the probe failed on another process, or has other layers there")
            self._size = size

    def _try_to_keep(self) -> None:
        try:
            self._keep_pending()
        except _ElsewhereError as error:
            self._warn(f"could not probe the model at step {self.steps:,}", error)
        except Exception as error:  # whatever a disk, a service or a user's function may raise
            self._warn("could not write the numbers of a probe to a destination (to=)", error)

    def _keep_pending(self) -> Snapshot | None:
        """Give what was launched to the destinations: the last snapshot."""
        snapshot = None
        while self._pending:
            pending, late = self._pending.pop(0), Packed()
            began = time.monotonic()
            _add_collapse(late, pending.sparse, self.noise)
            snapshot = self._finished(pending, late.joined(pending.sent), began)
        return snapshot

    def _finished(self, pending: "_Pending", tables: dict[str, pd.DataFrame], began: float) -> Snapshot:
        """The snapshot with its alarms, given to the destinations."""
        assert self._destination is not None
        faults_only(tables)
        if self.ranks > 1 and int(tables["steps"].pop(_PROCESSES)[0]) < self.ranks:
            raise _ElsewhereError("the probe failed on another process, which reports why")
        now = time.monotonic()
        seconds = {"seconds": now - self._began, "probe_seconds": pending.seconds + now - began}
        tables["steps"] = steps = tables.get("steps", pd.DataFrame([{}])).assign(**seconds)
        tables = {name: tables[name] for name in TABLES if name in tables}
        for table in tables.values():
            table.insert(0, "step", pending.step)
        if "gradient" not in steps or not float(steps["gradient"].iloc[0]):
            self._warn(
                "found no gradients: call watch.step() before zero_grad(), or watch.gradients() between backward() and "
                "zero_grad()"
            )
        snapshot = Snapshot(pending.step, tables)
        alarms = self.alarms.add(snapshot)
        if alarms:
            snapshot.tables["alarms"] = pd.DataFrame([alarm.row for alarm in alarms])
        self._destination.write(snapshot)
        for alarm in alarms:
            log.log(
                logging.WARNING if alarm.severity == "warning" else logging.INFO, "step %s: %s", f"{alarm.step:,}", alarm.text
            )
            try:
                if self.on_alarm is not None:
                    self.on_alarm(alarm)
            except Exception as error:  # of the user's function
                self._warn("called on_alarm, which failed", error)
        return snapshot

    def _about(self) -> dict[str, Any]:
        model, (rows, tokens) = self.model, self.model.viewed(self.sample).tokens.shape
        return {
            "model": view_text(model),
            "scheme": None if model.scheme is None else model.scheme.name,
            "schemes": scheme_text(model.schemes),
            "layers": model.layers,
            "heads": model.heads,
            "dim": model.dim,
            "parameters": model.parameters,
            "device": str(model.device),
            "every": self.every,
            "start": self.steps,
            "noise": self.noise,
            "rows": rows,
            "tokens": tokens,
            "processes": self.ranks,
            "version": __version__,
        }

    def _warn(self, what: str, error: Exception | None = None) -> None:
        """Report a problem of one kind once; not even a warning that is an error may stop the training."""
        kind = what.partition(" at step")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        if error is None:
            log.warning("normscope %s", what)
            return
        text = f"normscope {what}, and the training continues without it: {type(error).__name__}: {error}"
        try:
            warnings.warn(f"{text} (this is reported once; watch.close() turns the watch off)", RuntimeWarning, stacklevel=3)
        except RuntimeWarning:
            log.warning(text)

    def close(self) -> None:
        """End the watch: what is not yet on disk is written. Later steps are not probed."""
        self._closed = True
        self._try_to_keep()
        try:
            if self._destination is not None:
                self._destination.close()
        except Exception as error:  # as in ``step``
            self._warn("could not end a destination (to=)", error)

    def __repr__(self) -> str:
        about = f"{self.model.name}, {self.model.layers} layers, every {self.every} steps, at step {self.steps:,}"
        return f"<normscope.watch of {about}{', closed' * self._closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_destination", None) is not None:  # what is still on its way from a GPU is kept, too
            self.close()


@dataclass(frozen=True)
class _Memory:
    """A destination that keeps tables; not the watch, which would then hold its model as long as the interpreter runs."""

    tables: dict[str, pd.DataFrame] = field(default_factory=dict)

    def __call__(self, snapshot: Snapshot) -> None:
        for name, table in snapshot.tables.items():
            before = [self.tables[name]] if name in self.tables else []
            self.tables[name] = pd.concat([*before, table], ignore_index=True)


class _ElsewhereError(RuntimeError):
    """Another process has failed."""


@dataclass(frozen=True)
class _Pending:
    """A probe whose numbers are on their way."""

    step: int
    sent: Sent
    sparse: list[SparseRows]
    seconds: float


def _add_collapse(packed: Packed, sparse: list[SparseRows], noise: float) -> None:
    for layer, means in collapse_of(sparse, noise):
        packed.add("heads", "collapse", means, [{"layer": layer, "head": head} for head in range(len(means))])


def _patient(observer: Observer, failures: list[Exception]) -> Observer:
    """An observer that observes nothing more after a failure, which it keeps."""

    def patient(call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        def observe(*given: Any) -> Any:
            if failures:
                return None
            try:
                return call(*given) if call is not None else None
            except Exception as error:  # the pass goes on
                failures.append(error)
                return None

        return None if call is None else observe

    calls = {each.name: patient(getattr(observer, each.name)) for each in fields(observer)}
    return Observer(**calls)


def _close(reference: "weakref.ref[Watch]") -> None:
    watch = reference()
    if watch is not None:
        watch.close()


def _check_numbers(least: int = 1, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name}={value!r}: give a whole number of at least {least}")


def _in_team() -> bool:
    return dist.is_available() and dist.is_initialized()


def _undisturbed(module: nn.Module) -> ExitStack:
    """Until the block ends: nothing is compiled, and random generators and casts of weights are as before afterwards."""
    stack = ExitStack()
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    stack.enter_context(torch.random.fork_rng(devices=devices))
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(casts_forgotten())
    return stack
