"""A callback of Lightning's ``Trainer`` that watches its training."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn

from normscope.errors import InputError, MissingExtraError
from normscope.models.inputs import device_of
from normscope.models.wrapped import unwrapped
from normscope.watch.in_loop import TWICE, default_folder, kept
from normscope.watch.watching import Watch

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, each with its own base class


def _bases() -> tuple[Any, ...]:
    """The base classes of the packages that are in use; else of the first that is installed."""
    installed = [name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None]
    used = [name for name in installed if name in sys.modules] or installed[:1]
    if not used:
        raise MissingExtraError("LightningCallback needs Lightning: pip install 'normscope[watch]'")
    return tuple(import_module(name).Callback for name in used)


class LightningCallback(*_bases()):  # type: ignore[misc]
    """Watches the model of a Lightning ``Trainer``: ``L.Trainer(callbacks=[ns.watch.LightningCallback(every=100)])``.

    Steps are those of the optimiser. Gradients are read before they are clipped.

    Args:
        every: steps between two probes.
        to: see ``Watch``; by default the folder ``watch`` in the folder of the Trainer's logs.
        probe: a batch; by default the first batch of the training.
        module: the name of the attribute of the LightningModule that is the model, such as ``net`` or ``net.encoder``; by
            default the LightningModule, or the only part of it with parameters if it has no ``forward``.
        options: further arguments of ``Watch``.

    Attributes:
        watch: the ``Watch`` of the training that began last; None before.
    """

    def __init__(self, every: int = 100, to: Any = None, probe: Any = None, module: str | None = None, **options: Any) -> None:
        super().__init__()
        self.every, self.to, self.probe, self.module, self.options = every, to, probe, module, options
        self.watch: Watch | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a second callback of this kind."""
        self.watch = None
        if sum(isinstance(callback, LightningCallback) for callback in trainer.callbacks) > 1:
            raise InputError(TWICE.format("the Trainer"))
        self._model(pl_module)

    def _model(self, pl_module: nn.Module) -> nn.Module:
        kind, parts = type(pl_module).__name__, dict(pl_module.named_children())
        if self.module is None:
            inherited = type(pl_module).forward.__module__.startswith(tuple(name.partition(".")[0] for name in _PACKAGES))
            if inherited and unwrapped(pl_module) is pl_module:
                raise InputError(f"{kind} has no forward(): name the model, module='{_largest(parts)}'")
            return pl_module
        modules: dict[str, nn.Module] = dict(pl_module.named_modules())
        if self.module not in modules:
            raise InputError(f"module='{self.module}': {kind} has no such module; it has {', '.join(parts)}")
        return modules[self.module]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Open the model when the first batch is there."""
        if self.watch is not None:
            return
        model, start = self._model(pl_module), _step(trainer)
        probe = kept(batch if self.probe is None else self.probe, device_of(model))
        to = default_folder(trainer.log_dir or trainer.default_root_dir, start > 0) if self.to is None else self.to
        self.watch = Watch(model, probe, self.every, to, start=start, **{"resume": start > 0, **self.options})

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Read the gradients."""
        if self.watch is not None:
            self.watch.gradients()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Probe the model if a step has ended, which batches of an accumulated gradient do not end, and is due."""
        if self.watch is not None and _step(trainer) > self.watch.steps:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            share = trainer.accumulate_grad_batches  # Lightning divides the loss by it
            self.watch.step(None if loss is None else loss * share, step=_step(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()


def _largest(parts: dict[str, nn.Module]) -> str:
    return max(parts, key=lambda name: sum(parameter.numel() for parameter in parts[name].parameters()), default="net")


def _step(trainer: Any) -> int:
    """Steps of the training; Lightning counts those of every optimiser."""
    return int(trainer.global_step) // max(len(trainer.optimizers), 1)
