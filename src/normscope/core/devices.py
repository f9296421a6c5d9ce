"""The device that a computation runs on."""

from normscope.errors import InputError


def chosen_device(name: str) -> str:
    """``auto`` resolved to a GPU if there is one; a device that this machine lacks raises ``InputError``."""
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        known = torch.device(name).type in ("cpu", "cuda")
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise InputError(f"device='{name}' is not available; allowed: auto, cpu{', cuda' * torch.cuda.is_available()}")
    return name
