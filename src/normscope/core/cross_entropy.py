"""Cross-entropy of the next token from the last hidden states.

On a GPU one kernel computes the loss of a row and replaces its logits by the gradient of that loss, so that the backward pass
needs nothing but products.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normscope.core.kernels import has_kernels


def cross_entropy(
    x: Float[Tensor, "positions dim"],
    weights: Float[Tensor, "dim vocabulary"],
    bias: Float[Tensor, " vocabulary"] | None,
    targets: Int[Tensor, " positions"],
    ignored: int,
) -> tuple[Float[Tensor, " positions"], Bool[Tensor, " positions"]]:
    """−log softmax(x W + b) of every target in float32, 0 where it is ``ignored``; and where the target has the largest logit.

    Under autocast logits have its precision, as those of ``F.linear`` do. In half precision on a GPU there are no second
    derivatives.
    """
    kind = x.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if bias is None and has_kernels(x.device, precision):
        losses, right, _ = _fused()(x.to(precision), weights.to(precision), targets, ignored)
        return losses, right
    logits = F.linear(x, weights.T, bias).float()
    losses = F.cross_entropy(logits, targets, ignore_index=ignored, reduction="none")
    # the largest logit is one of the softmax's intermediate results; where it is, of thousands of tokens, would be another pass
    chosen = logits.gather(1, targets.clamp(min=0)[:, None])
    return losses, (chosen >= logits.amax(1, keepdim=True))[:, 0] & (targets != ignored)


def _fused() -> Any:
    """The fused operator; Triton is imported only where there is a GPU for it."""
    from normscope.core.cross_entropy_kernel import fused_cross_entropy

    return fused_cross_entropy
