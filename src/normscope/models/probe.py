"""The structure of a model, observed in one forward pass of a small input."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from normscope.core.norms import factor_between, same
from normscope.models.blocks import Stream, stream_named, streams_of
from normscope.models.hooks import Site, before
from normscope.models.inputs import TOKEN_INPUT, call, is_encoder_decoder, main_input, precision_of, probe_sample, results
from normscope.models.observe import Sample
from normscope.models.placement import Placement, placement_of
from normscope.models.proof import proved_again, proved_heads, proved_scales
from normscope.models.record import Attended, Record, Recorder, is_norm
from normscope.models.states import floats
from normscope.models.wrapped import other_weights

_NEAR = 1e-5


class Probe:
    """What a recorded pass shows of one residual stream of a model.

    Attributes:
        streams: all residual streams that ran.
        stream: the one that is viewed.
        placements: of every layer, once they are located.
        attended: the self-attention of every layer; None for layers without softmax attention.
        attentions: the same as its module and its number among the attentions of the layer.
        crossings: the same for the attention to the encoder's states.
        sample: what the model read.
        reads_tokens: whether the stream is that of token ids, not of pixels or sound.
        output: its logits or last states.
    """

    def __init__(
        self, model: Any, stream: str | None = None, blocks: str | None = None, example: "Tensor | Sample | None" = None
    ) -> None:
        self.model, self.sample = model, probe_sample(model) if example is None else _sample_of(example)
        if self.sample.features is not None:
            self.sample = replace(self.sample, features=self.sample.features.to(precision_of(model)))
        rows, tokens = self.sample.tokens.shape
        shape = (rows,) if self.sample.features is not None else (rows, tokens, tokens - 1)
        recorder = Recorder(model)
        with ExitStack() as stack:
            recorder.install(stack)
            self.output = results(self._run())
        self.record: Record = recorder.record
        self.streams = streams_of(model, self.record, shape, blocks)
        self.stream = self._chosen(stream)
        inside = [self.record.attended_inside(block.call) for block in self.stream.blocks]
        shapes = [block.input.shape[:2] for block in self.stream.blocks]
        chosen = [
            _only([(n, a) for n, a in enumerate(several) if not a.crosses and _of_stream(a, *shape)])
            for several, shape in zip(inside, shapes, strict=True)
        ]
        self.attended = [None if one is None else one[1] for one in chosen]
        self.attentions = [None if one is None else Site(one[1].within.module, one[0]) for one in chosen]
        crossing = [next(((n, a) for n, a in enumerate(several) if a.crosses), None) for several in inside]
        self.crossings = [None if one is None else Site(one[1].within.module, one[0]) for one in crossing]
        self.dim = self.stream.blocks[-1].output.shape[-1]
        self.reads_tokens = self._reads_tokens()
        self.placements: list[Placement] = []

    def locate(self) -> None:
        """Find the slots of every layer, as far as other states prove them."""
        seen = [placement_of(block, self.record) for block in self.stream.blocks]
        placements = proved_again(self.stream.blocks, seen, self._run)
        if any(self.attended):
            again = [(placement, evidence) for placement, (_, evidence) in zip(placements, seen, strict=True)]
            placements = proved_heads(self.model, self.stream.blocks, again, self.attended, self.attentions, self._run)
        self.placements = proved_scales(self.model, self.stream.blocks, placements, self._run)

    def _reads_tokens(self) -> bool:
        """Whether the stream is that of token ids: its first states do not change with pixels."""
        if self.sample.features is None or main_input(self.model) != TOKEN_INPUT:
            return self.sample.features is None
        seen: list[Tensor] = []
        first = self.stream.blocks[0]

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(list(floats((args, kwargs)))[first.site.received])

        with ExitStack() as stack:
            before(stack, first.site.module, keep)
            stack.enter_context(torch.no_grad())
            call(self.model, replace(self.sample, features=-self.sample.features), self.sample.tokens[:, :-1])
        return torch.equal(first.site.layout.states(seen[0]), first.input)

    def _run(self) -> Any:
        """What the model returns for the sample; a decoder reads fewer tokens than its encoder, so that shapes differ."""
        with torch.no_grad():
            return call(self.model, self.sample, self.sample.tokens[:, :-1])

    def _chosen(self, name: str | None) -> Stream:
        """The stream of a name; else the decoder of an encoder-decoder, or the stream with the most parameters."""
        by_name = {stream.name: stream for stream in self.streams}
        if name is None:
            largest = max(self.streams, key=lambda stream: stream.parameters)
            return by_name.get("decoder", largest) if is_encoder_decoder(self.model) else largest
        return by_name[stream_named(name, by_name)]

    @property
    def degenerate(self) -> bool:
        """Whether zeros or non-finite values hide the structure."""
        return self.record.degenerate

    @property
    def traced(self) -> bool:
        """Whether the operations of some attention must be followed, since it does not call the registered function."""
        return any(each.attention.result is not None for each in self.attended if each is not None)

    @property
    def causal(self) -> bool:
        """Whether tokens depend only on themselves and those before them."""
        masks = [attended.attention.mask for attended in self.attended if attended is not None]
        if masks:
            return not any(bool(mask[..., 0, -1].any()) for mask in masks)
        tokens = self.sample.tokens.clone()
        tokens[:, -1] = 0
        if self.sample.features is not None or self.output.ndim != 3 or bool((tokens == self.sample.tokens).all()):
            return False
        with torch.no_grad():
            other = results(call(self.model, Sample.of(tokens)))
        return same(other[:, 0].flatten().double(), self.output[:, 0].flatten().double(), _NEAR)

    @property
    def outside(self) -> dict[str, nn.Module]:
        """The norms of the stream outside the layers, ``embedding`` and ``final``."""
        blocks = self.stream.blocks
        began, ended = blocks[0].call.began, blocks[-1].call.ended
        others = [block.call for stream in self.streams if stream is not self.stream for block in stream.blocks]
        first = max((call.ended for call in others if call.ended < began), default=0)
        last = min((call.began for call in others if call.began > ended), default=float("inf"))
        norms: dict[str, nn.Module] = {}
        for norm in self.record.calls:
            if norm.is_norm and norm.inputs[0].shape[-1] == self.dim:
                if first < norm.ended < began:
                    norms["embedding"] = norm.module
                elif ended < norm.began < last:
                    norms["final"] = norm.module
        return norms

    def embedding_factor(self, embedding: nn.Module | None) -> float:
        """The factor of the embedding before the first layer; 1 where it is not only multiplied."""
        entered = self.stream.blocks[0].input
        made = next((call.outputs[0] for call in self.record.calls if call.module is embedding and call.outputs), None)
        if made is None or made.shape != entered.shape:
            return 1.0
        factor = factor_between(entered, made)
        return factor if same(factor * made, entered, _NEAR) else 1.0


def _only(several: "list[tuple[int, Attended]]") -> "tuple[int, Attended] | None":
    """The attention of a layer, if it has one: heads that are computed one by one, or subtracted, are not those of one."""
    return several[0] if len(several) == 1 else None


def _of_stream(attended: Attended, rows: int, positions: int) -> bool:
    """Whether queries and keys are the positions of the stream: not windows of an image, nor fewer keys."""
    q, k = attended.attention.q, attended.attention.k
    return (len(q), q.shape[-2], k.shape[-2]) == (rows, positions, positions)


def _sample_of(example: Tensor | Sample) -> Sample:
    """An input that a user gave: token ids, or anything else that the model reads."""
    if isinstance(example, Sample):
        return example
    if not example.is_floating_point():
        return Sample.of(example)
    numbers = torch.arange(2, device=example.device).expand(len(example), 2)
    sample = Sample.of(numbers)
    return Sample(sample.tokens, sample.targets, sample.attention_mask, features=example)


@contextmanager
def zero_scales_as_one(model: nn.Module) -> Iterator[bool]:
    """Until the block ends: 1 in place of learned scales that are 0, since a block that adds nothing hides what it does.

    Yields whether there are any.
    """
    own = ([*module.parameters(recurse=False)] for module in model.modules() if not is_norm(module))
    scales = [p for several in own if all(p.numel() == max(p.shape, default=1) for p in several) for p in several]
    zero = [(scale, scale.data) for scale in scales if not bool(scale.any())]
    try:
        for scale, data in zero:
            scale.data = torch.ones_like(data)
        yield bool(zero)
    finally:
        for scale, data in zero:
            scale.data = data


@contextmanager
def typical_weights(model: nn.Module) -> Iterator[None]:
    """Random products, embeddings and norms in place of the model's: its structure shows even if its weights are degenerate.

    Parameters of other modules, such as learned scales of updates, stay as they are. Holds a second copy of the weights.
    """
    paths = {module: path for path, module in model.named_modules()}

    def drawn(module: nn.Module, name: str, weights: Tensor) -> Tensor | None:
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        if name not in module._parameters or not weights.is_floating_point():
            return None
        if not any(p.ndim > 1 for p in own) and not is_norm(module):
            return None
        generator = torch.Generator().manual_seed(crc32(f"{paths[module]}.{name}".encode()))  # the same in every process
        size = 0.1 if weights.ndim < 2 else weights.shape[-1] ** -0.5
        return (size * torch.randn(weights.shape, generator=generator) + (weights.ndim < 2)).to(weights)

    with other_weights(model, drawn):
        yield
