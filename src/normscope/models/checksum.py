"""A checksum of a model: the same for the same weights and configuration, whatever the model is called and wherever it lies."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def checksum(configuration: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """BLAKE2 of the configuration and of the names, types, shapes and bytes of tensors."""
    digest = hashlib.blake2b(configuration.encode(), digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers by name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
