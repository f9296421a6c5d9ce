"""A checksum of a model: the same for the same weights and configuration, whatever the model is called and wherever it lies."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = {"cpu": 1 << 16, "cuda": 1 << 26}  # that are mixed at once: as many as a CPU core caches, and as keep a GPU busy
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, of SplitMix64 and wyhash, as int64


def checksum(configuration: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """BLAKE2 of the configuration and of the names, types, shapes and contents of tensors."""
    digest = hashlib.blake2b(configuration.encode(), digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {content(tensor)}".encode())
    return digest.hexdigest()


def content(tensor: Tensor) -> int:
    """Σ_i mix(i, word_i) modulo 2⁶⁴ over the 32-bit words of a tensor: the same on every device, computed where the tensor is.

    A cryptographic digest of weights on a GPU would wait for all of them to be copied.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32) if raw.numel() % 4 else raw.view(torch.int32)
    total, count = torch.zeros((), dtype=torch.int64, device=words.device), _WORDS["cuda" if words.is_cuda else "cpu"]
    for first in range(0, len(words), count):
        part = words[first : first + count].long()
        place = torch.arange(first + 1, first + 1 + len(part), device=words.device)
        mixed = (part + place * _FACTORS[0]) * _FACTORS[1]
        mixed = (mixed ^ (mixed >> 32)) * _FACTORS[2]
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total)
