"""What an observer receives from a module's forward pass."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normscope.core.norms import orthogonal_part
from normscope.errors import InputError
from normscope.models.attention_interface import AttentionCall
from normscope.models.attention_trace import observing_attention
from normscope.models.fits import fitted
from normscope.models.head_reader import messages_matrix
from normscope.models.hooks import Running, SiteHooks, before, given_states, rotation_of
from normscope.models.observe import AttentionStep, OnAttention, Rotation, SublayerStep
from normscope.models.placement import Placement
from normscope.models.states import POSITIONS_FIRST

if TYPE_CHECKING:
    from normscope.models.module_model import ModuleModel


class AttentionHooks:
    """Passes the attention of every layer to an observer."""

    def __init__(
        self, model: "ModuleModel", running: Running, attention: OnAttention | None, cross: OnAttention | None
    ) -> None:
        self.model, self.running = model, running
        self._observed = [(model.attentions, attention), (model.crossings, cross)]
        self.stream = self.input = torch.empty(0)
        self.rotation: Rotation | None = None
        self.nth = -1

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe blocks and their attention."""
        self.running.entering(self._on_block)
        sites = [site for several, _ in self._observed for site in several if site is not None]
        for module in {id(site.module): site.module for site in sites}.values():
            before(stack, module, self._on_attention)
        stack.enter_context(observing_attention(self.model.model, self._attend, self.model.traced, self.model.thorough))

    def _on_block(self, layer: int, x: Tensor) -> None:
        self.stream, self.nth = x, -1

    def _on_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, layer = given_states(args, kwargs), self.running.layer
        turned = layer is not None and given.ndim == 3 and self.running.layouts[layer].kind == POSITIONS_FIRST
        self.input = given.transpose(0, 1) if turned else given
        self.rotation = rotation_of(kwargs, module in self.model.positioned)

    def _attend(self, call: AttentionCall) -> Tensor:
        """The mixed values that the observer returns, or those of the model."""
        layer = self.running.layer
        self.nth += 1
        for sites, observe in self._observed:
            site = None if layer is None else sites[layer]
            if layer is not None and site is not None and site.nth == self.nth and observe is not None:
                mixed = observe(self._step(layer, call, sites is self.model.attentions))
                return call.mixed() if mixed is None else mixed
        return call.mixed()

    def _step(self, layer: int, call: AttentionCall, own: bool) -> AttentionStep:
        placement = self.model.placements[layer]
        known = own and placement.output_projection is not None and not placement.changed
        W_O = None
        if known:
            with suppress(InputError):  # a parametrized product has no matrix that could be read
                W_O = messages_matrix(self.model.output_projection(layer), call.q.shape[1])
        values = (call.q, call.k, call.v, call.scale, call.mask, W_O, call.softcap, self.rotation, call.bias, call.sink)
        return AttentionStep(layer, self.stream, self.input, *values)


class SublayerHooks:
    """Passes states and updates inside every block to an observer, when the block ends."""

    def __init__(self, model: "ModuleModel", running: Running, observe: Callable[[SublayerStep], None]) -> None:
        self.model, self.running, self.observe = model, running, observe
        self.values: dict[str, Tensor] = {}
        self.learned = {layer: scales for layer, scales in enumerate(model.learned_scales) if scales}

    def install(self, stack: ExitStack) -> None:
        """Until the stack unwinds: observe the blocks whose branches are identified."""
        self.running.entering(self._on_block)
        sites = SiteHooks(self.running)
        for layer, placement in enumerate(self.model.placements):
            if placement.entry is not None:
                sites.at(layer, placement.entry, partial(self._keep, "before"))
            for name, branch in placement.sublayers:
                sites.at(layer, branch.result, partial(self._keep, f"{name} output"))
                if "output" in branch.norms:
                    sites.at(layer, branch.norms["output"], partial(self._keep, f"{name} normalised"))
                if branch.reader is not None:
                    sites.at(layer, branch.reader, partial(self._keep, f"{name} after"))
                if "stream" in branch.norms and layer in self.learned:
                    sites.at(layer, replace(branch.norms["stream"], received=True), partial(self._keep, f"{name} total"))
        sites.install(stack)
        self.running.leaving(self._on_end)

    def _on_block(self, layer: int, x: Tensor) -> None:
        self.values = {"before": x.clone()}

    def _keep(self, key: str, states: Tensor) -> None:
        """A copy, since a model may change its states in place."""
        self.values[key] = states.clone()

    def _on_end(self, layer: int, left: Tensor) -> None:
        values, self.values = self.values, {}
        states, placement = values["before"], self.model.placements[layer]
        last = next(reversed(placement.branches), "")
        for name, _ in placement.sublayers:
            self._observe(layer, name, placement, values, states, left.clone() if name == last else None)
            states = values.get(f"{name} after", states)

    def _observe(
        self, layer: int, name: str, placement: Placement, values: dict[str, Tensor], states: Tensor, left: Tensor | None
    ) -> None:
        scales, result = placement.branches[name].scales, values[f"{name} output"]
        added = values.get(f"{name} normalised", result)
        added = orthogonal_part(added, states) if placement.branches[name].tangent else added
        end = None if placement.shares(name) else values.get(f"{name} after", left)
        learned, total = self.learned.get(layer), values.get(f"{name} total", end)
        if learned and end is not None and total is not None:  # scales of when the model was opened may have changed
            scales = fitted(states, added, total, by_channel=any(scale.numel() == self.model.dim for scale in learned))
        update = scales.step * added
        self.observe(SublayerStep(layer, name, states, result, update, end, scales.step, scales.carry))
