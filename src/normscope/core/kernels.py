"""Where the Triton kernels of this package can run."""

from functools import cache

import torch

_HALF = (torch.bfloat16, torch.float16)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether half-precision kernels run on a device: a GPU with Triton."""
    return device.type == "cuda" and dtype in _HALF and _has_triton()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_triton() -> bool:
    """Whether Triton can be imported; a compiled step does not trace the import."""
    return _import_triton()


@cache
def _import_triton() -> bool:
    """Whether the import succeeds: a stub, or a library that Triton needs and does not have, makes it fail."""
    try:
        import triton.language  # noqa: F401
    except ImportError:
        return False
    return True
