"""Where the Triton kernels of this package can run."""

from importlib.util import find_spec

import torch

_HALF = (torch.bfloat16, torch.float16)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether half-precision kernels run on a device: a GPU with Triton."""
    return device.type == "cuda" and dtype in _HALF and _TRITON


def triton_installed() -> bool:
    """Whether Triton is installed; a stub that another library left in its place has no specification."""
    try:
        return find_spec("triton") is not None
    except ValueError:
        return False


_TRITON = triton_installed()
