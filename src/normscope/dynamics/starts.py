"""Where tokens start: orthogonal, uniform, gaussian, in a cone, or from a file."""

import math
import warnings
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from normscope.core.norms import tangent, unit
from normscope.errors import InputError, require_known
from normscope.machine.files import read_array, regular_file
from normscope.machine.memory import require_memory

STARTS = ("orthogonal", "uniform", "gaussian", "cone")
_COPIES = 3  # of a file's numbers in memory, as they are read, in float64 and scaled
Start = Float[Tensor, "*runs tokens dim"]


def make_start(
    kind: str,
    tokens: int,
    dim: int,
    *,
    delta: float = 0.01,
    radius: float = 1.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    runs: tuple[int, ...] = (),
) -> Start:
    """Tokens of shape (*runs, tokens, dim).

    ``orthogonal``: the first unit vectors. ``uniform``: on the sphere. ``gaussian``: N(0, 1/d) in every coordinate, so radii
    vary about 1. ``cone``: directions with every pairwise cosine at least 1 − delta. All are multiplied by ``radius``.
    """
    check_sizes(kind, tokens, dim, delta, radius)
    if kind == "orthogonal":
        start = torch.eye(tokens, dim, dtype=dtype, device=device).expand(*runs, tokens, dim).clone()
    else:
        normal = torch.randn(*runs, tokens, dim, generator=generator, dtype=dtype, device=device)
        if kind == "gaussian":
            start = normal / math.sqrt(dim)
        elif kind == "uniform":
            start = unit(normal)
        else:
            start = _cone(normal, delta, generator)
    return radius * start


def read_start(path: Path) -> Float[Tensor, "tokens dim"]:
    """Tokens from a file: ``.npy`` or ``.csv`` (a token a line) with an array tokens × dim, or ``.safetensors`` with one."""
    from safetensors import SafetensorError

    try:
        tokens = _read_array(regular_file(path, "start file"))
    except InputError:
        raise
    except (OSError, ValueError, TypeError, SafetensorError) as error:  # TypeError for numbers that torch has no type for
        raise InputError(f"cannot read the start file '{path}': {' '.join(str(error).split())[:200]}") from error
    if tokens.ndim != 2 or tokens.is_complex():
        raise InputError(
            f"a start file holds real numbers, tokens × dim; '{path}' has {tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    return check_start(tokens.to(torch.float64))


def check_start(x: Start) -> Start:
    """Refuse a start in which a token has no direction."""
    if x.ndim < 2 or 0 in x.shape:
        raise InputError(f"a start is an array tokens × dim with at least one of each, not of shape {tuple(x.shape)}")
    broken = (~torch.isfinite(x).all(-1) | (x == 0).all(-1)).flatten().nonzero()
    if len(broken):
        token = int(broken[0]) % x.shape[-2]
        raise InputError(f"token {token} of the start is zero or not finite; every token needs a direction")
    return x


def _read_array(path: Path) -> Tensor:
    require_memory({f"the start file '{path}'": _COPIES * path.stat().st_size})
    if path.suffix == ".npy":
        return torch.from_numpy(read_array(path, "start file"))
    if path.suffix == ".csv":
        import numpy as np

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty file is refused below
            return torch.from_numpy(np.loadtxt(path, delimiter=",", ndmin=2))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        arrays = load_file(path)
        if len(arrays) != 1:
            raise InputError(f"'{path}' holds {len(arrays)} arrays; a start file holds one")
        return next(iter(arrays.values()))
    raise InputError(f"a start file ends in .npy, .csv or .safetensors, not '{path}'")


def check_sizes(kind: str, tokens: int, dim: int, delta: float, radius: float) -> None:
    """Refuse a start that cannot be drawn."""
    require_known("start", kind, STARTS)
    if tokens < 1 or dim < 1:
        raise InputError(f"tokens and dim are at least 1, not {tokens} and {dim}")
    if kind == "orthogonal" and tokens > dim:
        raise InputError(f"{tokens} orthogonal tokens need at least {tokens} dimensions, not {dim}")
    if kind == "cone" and not (0 < delta <= 1):
        raise InputError(f"the cone's delta is above 0 and at most 1, not {delta}")
    if not (math.isfinite(radius) and radius > 0):
        raise InputError(f"the radius of a start is a positive number, not {radius}")


def _cone(normal: Tensor, delta: float, generator: torch.Generator | None) -> Tensor:
    """Tilt one common axis by an angle of at most half the angle whose cosine is 1 − delta, for each token its own way."""
    axis = torch.zeros_like(normal)
    axis[..., 0] = 1.0
    sideways = unit(tangent(axis, normal))
    shape = (*normal.shape[:-1], 1)
    share = torch.rand(shape, generator=generator, dtype=normal.dtype, device=normal.device)
    angle = share * (math.acos(1 - delta) / 2)
    return torch.cos(angle) * axis + torch.sin(angle) * sideways
