"""The Triton kernel of ``cross_entropy`` and its derivative: import it only where Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from normscope.errors import InputError

_BLOCK, _WARPS = 4096, 8


@triton.jit
def loss_and_gradient_kernel(logits, targets, losses, right, ignored, vocabulary, BLOCK: tl.constexpr):
    """The loss of one row; its logits become softmax − one-hot, or 0 where the target is ignored."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    target = tl.load(targets + row)
    wanted = target != ignored
    # read before any barrier, after which other warps may have replaced it
    chosen = tl.load(start + tl.where(wanted, target, 0)).to(tl.float32) * 1.4426950408889634
    column = tl.arange(0, BLOCK)
    most = -float("inf")
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        here = first + column
        x = tl.load(start + here, mask=here < vocabulary, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(most, tl.max(x, 0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but masked tokens so far
        total = total * tl.exp2(most - finite) + tl.sum(tl.exp2(x - finite), 0)
        most = higher
    tl.store(losses + row, tl.where(wanted, (most + tl.log2(total) - chosen) * 0.6931471805599453, 0.0))
    tl.store(right + row, wanted & (chosen >= most))
    factor = tl.where(wanted, 1.0 / total, 0.0)
    one = tl.where(wanted, 1.0, 0.0)
    for first in range(0, vocabulary, BLOCK):
        here = first + column
        x = tl.load(start + here, mask=here < vocabulary, other=-float("inf"), eviction_policy="evict_first")
        gradient = tl.exp2(x.to(tl.float32) * 1.4426950408889634 - most) * factor - tl.where(here == target, one, 0.0)
        tl.store(start + here, gradient.to(x.dtype), mask=here < vocabulary)


@custom_op("normscope::cross_entropy", mutates_args=())
def fused_cross_entropy(x: Tensor, weights: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of x (positions, dim), whether each target has the largest logit, and the losses' gradient by the logits."""
    gradient = x @ weights
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    right = torch.empty(len(x), dtype=torch.bool, device=x.device)
    if len(x):
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            loss_and_gradient_kernel[(len(x),)](
                gradient, targets.contiguous(), losses, right, ignored, gradient.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
            )
    return losses, right, gradient


@fused_cross_entropy.register_fake
def _(x, weights, targets, ignored):
    rows = len(x)
    return x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.bool), x.new_empty(rows, weights.shape[1])


def _remember(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], output[2])


def _differentiate(ctx, d_losses, d_right, d_gradient):
    if d_gradient is not None:  # of the gradient that the first backward pass uses
        raise InputError("cross_entropy has no second derivatives in half precision on a GPU: use float32")
    if d_losses is None:
        return None, None, None, None
    x, weights, gradient = ctx.saved_tensors
    share = d_losses[:, None]
    return (gradient @ weights.T * share).to(x.dtype), (x * share).to(x.dtype).T @ gradient, None, None


fused_cross_entropy.register_autograd(_differentiate, setup_context=_remember)
