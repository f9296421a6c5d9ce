"""Which device a computation runs on."""

import torch

from normscope.errors import InputError


def chosen_device(device: str) -> str:
    """``auto`` resolved to a GPU if there is one, and a device that is not available refused."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
        known = torch.device(device).type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise InputError(f"device=: no device '{device}' here; allowed: auto, cpu{', cuda' * torch.cuda.is_available()}")
    return device
