"""What an observer receives from a model of the ``transformers`` library."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normscope.models.attention_interface import AttentionCall, observing
from normscope.models.hooks import after, before, first_output, given_states, rotation_of
from normscope.models.layouts import messages_matrix
from normscope.models.observe import AttentionStep, SublayerStep
from normscope.models.placement import Placement

if TYPE_CHECKING:
    from normscope.models.hugging_face import HuggingFaceModel


class AttentionHooks:
    """Passes the attention of every layer to an observer."""

    def __init__(self, model: "HuggingFaceModel", observe: Callable[[AttentionStep], Tensor | None]) -> None:
        self.model, self.observe = model, observe
        self.layers = {id(module): layer for layer, module in enumerate(model.attentions)}
        self.stream = self.input = torch.empty(0)
        self.rotation: tuple[Tensor, Tensor] | None = None

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe blocks and their attention."""
        for block, attention in zip(self.model.blocks, self.model.attentions, strict=True):
            before(stack, block, self._on_block)
            before(stack, attention, self._on_attention)
        stack.enter_context(observing(self._attend))

    def _on_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stream = given_states(args, kwargs)

    def _on_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input, self.rotation = given_states(args, kwargs), rotation_of(kwargs)

    def _attend(self, call: AttentionCall) -> Tensor:
        """The mixed values that the observer returns, or those of the model."""
        layer = self.layers[id(call.module)]
        placement = self.model.placements[layer]
        known = placement.output_projection is not None and not placement.changed
        W_O = messages_matrix(self.model.output_projection(layer), self.model.heads) if known else None
        values = (call.q, call.k, call.v, call.scale, call.mask, W_O, call.softcap, self.rotation, call.bias, call.sink)
        mixed = self.observe(AttentionStep(layer, self.stream, self.input, *values))
        return call.mixed() if mixed is None else mixed


class SublayerHooks:
    """Passes states and updates inside every block to an observer, when the block ends."""

    def __init__(self, model: "HuggingFaceModel", observe: Callable[[SublayerStep], None]) -> None:
        self.model, self.observe = model, observe
        self.values: dict[str, Tensor] = {}

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe the blocks whose branches are identified."""
        for layer, (block, placement) in enumerate(zip(self.model.blocks, self.model.placements, strict=True)):
            if placement.unclear:
                continue
            before(stack, block, self._on_block)
            for name, branch in placement.branches.items():
                after(stack, branch.result, partial(self._on_output, f"{name} output", ""))
                if "output" in branch.norms:
                    after(stack, branch.norms["output"], partial(self._on_output, f"{name} normalised", f"{name} output"))
                if branch.reader is not None:
                    before(stack, branch.reader, partial(self._on_input, f"{name} after", f"{name} output"))
            after(stack, block, partial(self._on_end, layer, placement))

    def _on_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {"before": given_states(args, kwargs).clone()}

    def _on_output(self, key: str, needs: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._keep(key, needs, first_output(output))

    def _on_input(self, key: str, needs: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(key, needs, given_states(args, kwargs))

    def _keep(self, key: str, needs: str, x: Tensor) -> None:
        """The first value after another one; a copy, since a model may change its states in place."""
        if key not in self.values and (not needs or needs in self.values):
            self.values[key] = x.reshape_as(self.values["before"]).clone()

    def _on_end(self, layer: int, placement: Placement, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        values, self.values = self.values, {}
        states, left = values["before"], first_output(output)
        for name in placement.branches:
            scales, result = placement.branches[name].scales, values[f"{name} output"]
            update = scales.step * values.get(f"{name} normalised", result)
            end = left.clone() if name == "feedforward" and not placement.parallel else None
            step = SublayerStep(
                layer, name, states, result, update, values.get(f"{name} after", end), scales.step, scales.carry
            )
            self.observe(step)
            states = states if step.after is None else step.after
