"""Causal attention with other scores than a plain softmax, in kernels that a compiled step can use.

A temperature is a factor on queries. A sink scales what plain attention returns, by σ(lse − b) with lse the log-sum-exp of the
logits, and its gradient is that of plain attention with the log-sum-exp of the logits and the sink: p_ij = exp(s_ij − lse') and
D_i = ⟨∂out_i, out_i⟩ are all that the fused backward kernel asks for. A softcap needs FlexAttention, which is for GPUs.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normscope.core.scores import Scores, attend_scored

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Heads = Float[Tensor, "rows heads tokens head"]


def attend_causal(
    q: Heads,
    k: Heads,
    v: Heads,
    scale: Tensor,
    scores: Scores,
    sink: Float[Tensor, " heads"] | None,
    blocks: "BlockMask | None",
) -> Heads:
    """Causal attention with ``scores``: fused where a compiled step has a kernel for them, else in blocks of queries.

    Args:
        q: queries; k and v: keys and values of the same tokens.
        k: keys.
        v: values.
        scale: the factor on ⟨q, k⟩.
        scores: how logits become weights.
        sink: the logits of the sinks, if ``scores`` has one.
        blocks: ``causal_blocks`` of the tokens, which FlexAttention needs.
    """
    if not torch.compiler.is_compiling() or not _has_kernel(q, scores, blocks):
        return attend_scored(q, k, v, scale, scores, True, sink)
    factor = scale
    if scores.temperature is not None:
        seen = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=torch.float32)
        factor = scale * scores.temperature(seen)[:, None]
    q = (q * factor).to(q.dtype)
    if scores.cap is not None:
        return _capped(q, k, v, scores.cap, sink, blocks)
    if sink is not None:
        return attend_with_sink(q, k, v, sink)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def attend_with_sink(q: Heads, k: Heads, v: Heads, sink: Float[Tensor, " heads"]) -> Heads:
    """Softmax over the keys and a sink of logit b, whose value is zero: plain attention times σ(lse − b)."""
    out: Tensor = _SinkAttention.apply(q, k, v, sink)  # type: ignore[no-untyped-call]
    return out


@lru_cache(maxsize=8)
def causal_blocks(tokens: int, device: torch.device) -> "BlockMask":
    """The blocks of queries and keys that a causal mask leaves, for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda row, head, query, key: key <= query, None, None, tokens, tokens, device=device)


def _has_kernel(q: Tensor, scores: Scores, blocks: "BlockMask | None") -> bool:
    if scores.cap is not None:
        return blocks is not None
    return scores.sink is None or not q.is_cuda or (q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0)


def _capped(q: Tensor, k: Tensor, v: Tensor, cap: float, sink: Tensor | None, blocks: "BlockMask | None") -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    if sink is None:
        plain: Tensor = flex_attention(q, k, v, score_mod=capped, block_mask=blocks, scale=1.0)
        return plain
    out, lse = flex_attention(q, k, v, score_mod=capped, block_mask=blocks, scale=1.0, return_lse=True)
    return out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)


class _SinkAttention(torch.autograd.Function):
    """PyTorch's fused causal attention, forward and backward, with a sink's share taken out of both."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        """The mixed values."""
        random: list[Tensor] = []  # the state of a dropout that there is not, which the backward kernel still asks for
        if q.is_cuda:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out, lse, _, _, _, _, *random, _ = flash(q, k, v, 0.0, True, False, scale=1.0)
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=1.0)
        total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
        mixed: Tensor = out * torch.exp(lse - total)[..., None]
        if mixed.dtype != out.dtype:  # a cast that returns its input costs torch.compile 2.11 all gradients (pytorch#180642)
            mixed = mixed.to(out.dtype)
        ctx.save_for_backward(q, k, v, sink, mixed, total, *random)
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k, v and the sinks: ∂b = −Σ_i m_i D_i."""
        q, k, v, sink, mixed, total, *random = ctx.saved_tensors
        gradient, tokens = gradients[0].to(mixed.dtype), q.shape[-2]
        given = (gradient, q, k, v, mixed, total)
        if q.is_cuda:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
            of_qkv = backward(*given, None, None, tokens, tokens, 0.0, True, *random, scale=1.0)
        else:
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            of_qkv = backward(*given, 0.0, True, scale=1.0)
        mass = torch.exp(sink.to(total.dtype)[:, None] - total)
        of_sink = -(mass * (gradient.to(total.dtype) * mixed).sum(-1)).sum((0, 2))
        return (*of_qkv, of_sink.to(sink.dtype))
