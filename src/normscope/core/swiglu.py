"""SwiGLU: u ⊙ silu(v), u and v the halves of the hidden units; one kernel each way on a GPU.

Compiled from PyTorch's operations, the backward pass would compute the product again.
"""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normscope.core.kernels import has_kernels


def swiglu(hidden: Float[Tensor, "*batch two_halves"]) -> Float[Tensor, "*batch half"]:
    """U ⊙ silu(v) for hidden = (u, v); without second derivatives in half precision on a GPU."""
    if has_kernels(hidden.device, hidden.dtype):
        product: Tensor = _fused()(hidden)
        return product
    u, v = hidden.chunk(2, -1)
    return u * F.silu(v)


def _fused() -> Any:
    """The fused operator; Triton is imported only where there is a GPU for it."""
    from normscope.core.swiglu_kernel import fused_swiglu

    return fused_swiglu
