"""The matrices, norms and rotations of attention in the modules of ``transformers``: a few layouts cover the families."""

import inspect
import sys
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normscope.errors import InputError
from normscope.models.model import HeadProjections
from normscope.models.norm_modules import bare, width_of
from normscope.models.offload import weight_of, weights_of

_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
_BY_PART = ("c_attn", "qkv_proj", "Wqkv")  # all of q, then all of k, then all of v
_BY_HEAD = ("query_key_value",)  # q, k, v of the first head, then of the second


def projections_of(attention: nn.Module, out: nn.Module, heads: int, head: int) -> HeadProjections:
    """The matrices of an attention module by head; ``out`` is what its mixed values go through."""
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = _query_key_value(attention, heads, head)
    b_O = product(out)[1]
    split = [_by_head(W, b, heads, head) for W, b in ((W_Q, b_Q), (W_K, b_K), (W_V, b_V))]
    matrices, biases = zip(*split, strict=True)
    shared = heads * head // W_K.shape[1]
    W_O = messages_matrix(out, heads)
    return HeadProjections(matrices[0], matrices[1], matrices[2], W_O, biases[0], biases[1], biases[2], b_O, shared)


def messages_matrix(out: nn.Module, heads: int) -> Float[Tensor, "heads value dim"]:
    """W_O by head."""
    weight, _ = product(out)
    return weight.reshape(heads, -1, weight.shape[1])


def _query_key_value(attention: nn.Module, heads: int, head: int) -> list[tuple[Tensor, Tensor]]:
    """W_Q, W_K and W_V, (dim, width), with their biases."""
    for names in _SEPARATE:
        parts = [getattr(attention, name, None) for name in names]
        if parts[0] is not None and parts[1] is not None:
            # a layer without W_V uses its keys as values
            return [product(part if part is not None else parts[1]) for part in parts]
    for name in _BY_PART:
        part = getattr(attention, name, None)
        if part is not None:
            W, b = product(part)
            shared = (W.shape[1] - heads * head) // 2
            widths = [W.shape[1] - 2 * shared, shared, shared]
            return list(zip(torch.split(W, widths, 1), torch.split(b, widths), strict=True))
    for name in _BY_HEAD:
        part = getattr(attention, name, None)
        if part is not None and getattr(part, "weight", torch.empty(0, 0)).shape[0] == 3 * heads * head:
            W, b = product(part)
            by_head = W.reshape(len(W), heads, 3, head), b.reshape(heads, 3, head)
            return [(by_head[0][:, :, i].flatten(1), by_head[1][:, i].flatten()) for i in range(3)]
    children = ", ".join(name for name, _ in attention.named_children())
    raise InputError(f"unsupported architecture: the matrices of {type(attention).__name__} are not identified ({children})")


def product(module: Any) -> tuple[Tensor, Tensor]:
    """Weight (inputs, outputs) and bias of a product, which ``Conv1D`` keeps the other way round from ``Linear``."""
    if not isinstance(getattr(module, "weight", None), Tensor):
        raise InputError(f"unsupported architecture: a {type(module).__name__} has no weight matrix")
    weight, bias = weight_of(module), weight_of(module, "bias")
    assert weight is not None
    weight = weight if type(module).__name__ == "Conv1D" else weight.T
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias


def _by_head(W: Tensor, b: Tensor, heads: int, head: int) -> tuple[Tensor, Tensor]:
    """(heads, dim, head) and (heads, head); heads that several queries share are repeated."""
    own = W.shape[1] // head
    if W.shape[1] % head or own == 0 or heads % own:
        raise InputError(f"unsupported architecture: a projection of width {W.shape[1]} is not one of {heads} heads of {head}")
    matrices = W.reshape(len(W), own, head).transpose(0, 1).repeat_interleave(heads // own, 0)
    return matrices, b.reshape(own, head).repeat_interleave(heads // own, 0)


def normalise_heads(norm: nn.Module | None, x: Float[Tensor, "rows heads tokens head"], shared: int) -> Tensor:
    """A norm by head, or over all heads together; a head that several queries share counts once."""
    if norm is None:
        return x
    own = x[:, ::shared]
    parameters, norm = {name: parameter.to(x.dtype) for name, parameter in weights_of(norm).items()}, bare(norm)
    if width_of(norm) in (None, x.shape[-1]):
        made: Tensor = torch.func.functional_call(norm, parameters, (own,))
    else:
        by_token = own.transpose(1, 2)
        made = torch.func.functional_call(norm, parameters, (by_token.flatten(2),)).view_as(by_token).transpose(1, 2)
    return made.repeat_interleave(shared, 1)


def rotate(attention: nn.Module, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation that the model's own code applies; some families rotate q and k in one call, some one by one."""
    rotation = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    width = cos.shape[-1]
    if width < q.shape[-1]:  # only the first components are rotated
        q_turned, k_turned = rotate(attention, q[..., :width], k[..., :width], cos, sin)
        return torch.cat((q_turned, q[..., width:]), -1), torch.cat((k_turned, k[..., width:]), -1)
    if "k" in inspect.signature(rotation).parameters:
        rotated: tuple[Tensor, Tensor] = rotation(q, k, cos, sin)
        return rotated
    return rotation(q, cos, sin), rotation(k, cos, sin)
