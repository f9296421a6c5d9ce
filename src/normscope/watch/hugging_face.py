"""A callback of the Hugging Face ``Trainer`` that watches its training."""

from typing import Any

import transformers

from normscope.errors import InputError
from normscope.models.inputs import device_of
from normscope.watch.in_loop import TWICE, default_folder, first_rows, kept
from normscope.watch.watching import Watch

_MARK = "_normscope_watch"
_NORM = "grad_norm"  # of all gradients before they are clipped, as the Trainer logs it


class TrainerCallback(transformers.TrainerCallback):
    """Watches the model of a ``transformers.Trainer``: ``Trainer(..., callbacks=[ns.watch.TrainerCallback(every=100)])``.

    Steps are those of ``state.global_step``. Gradients are read as the optimiser receives them, after clipping. The loss of a
    probe is what the Trainer logs at that step: choose ``every`` and ``logging_steps`` so that they meet. So is ``grad_norm``,
    the gradient norm before clipping.

    Args:
        every: steps between two probes.
        to: see ``Watch``; by default the folder ``watch`` in ``output_dir``, which a resumed training continues.
        probe: a batch; by default the first rows of the training dataset, as the Trainer's collator makes a batch of them.
        options: further arguments of ``Watch``.

    Attributes:
        watch: the ``Watch`` of the training that began last; None before.
    """

    def __init__(self, every: int = 100, to: Any = None, probe: Any = None, **options: Any) -> None:
        self.every, self.to, self.probe, self.options = every, to, probe, options
        self.watch: Watch | None = None
        self._held = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a second callback of this kind."""
        _claim(state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the model as the Trainer has prepared it."""
        _claim(state)
        model, resumed, probe = kwargs["model"], state.global_step > 0, self.probe
        if probe is None:
            probe = first_rows(kwargs.get("train_dataloader"), args.per_device_train_batch_size, model)
        to = default_folder(args.output_dir, resumed) if self.to is None else self.to
        options = {"resume": resumed, **self.options}
        self.watch = Watch(model, kept(probe, device_of(model)), self.every, to, start=state.global_step, **options)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the gradients, which are cleared before the step ends."""
        if self.watch is not None:
            self.watch.gradients()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Probe the model if it is due, once the loss of the step is known or the next step begins."""
        self._held = True
        if self.watch is not None and not self.watch.due(state.global_step):
            self._step(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The loss of the step that has ended is known."""
        if "loss" in (logs or {}):
            norm = logs.get(_NORM)
            self._step(state, logs["loss"], **({} if norm is None else {_NORM: norm}))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loss of the step before was not logged."""
        self._step(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch."""
        self._step(state)
        if self.watch is not None:
            self.watch.close()

    def _step(self, state: Any, loss: float | None = None, **numbers: float) -> None:
        if self.watch is not None and self._held:
            self._held = False
            self.watch.step(loss, step=state.global_step, **numbers)


def _claim(state: Any) -> None:
    """A Trainer has another state for every training, which all of its callbacks receive."""
    if hasattr(state, _MARK):
        raise InputError(TWICE.format("the Trainer"))
    setattr(state, _MARK, True)
