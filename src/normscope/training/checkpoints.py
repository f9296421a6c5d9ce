"""Checkpoints: whole or absent, known by their run, checked before they are believed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import InputError
from normscope.runs import fingerprint, locked, unfinished_folder

_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a step: every tensor by name."""

    step: int
    tensors: dict[str, Tensor]

    @property
    def identity(self) -> str:
        """What the data of the run are known by."""
        return bytes(self.tensors["data"].tolist()).decode()

    @property
    def on_cpu(self) -> "Checkpoint":
        """The same, where every process can read it."""
        return Checkpoint(self.step, {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()})


class DamagedError(Exception):
    """A checkpoint that must not be used, and why."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, beside the folder in which it will end."""

    folder: Path
    run: str

    @classmethod
    def of(cls, path: Path | str, configuration: Mapping[str, Any]) -> "Checkpoints":
        """Those of the run with this configuration that is to end up under ``path``."""
        return cls(unfinished_folder(path, configuration), fingerprint(configuration))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep a second process out of the folder, for as long as this one lives; a folder without a checkpoint is not left."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / "lock"))
            except BlockingIOError:
                raise InputError(
                    f"another process is training into '{self.folder}'; wait for it, or choose another out="
                ) from None
            except OSError as error:
                raise InputError(f"cannot write to '{self.folder.parent}': {error.strerror}; choose another out=") from error
            try:
                yield
            finally:
                if not self.paths:
                    self.discard()

    def discard(self) -> None:
        """Remove the folder, once the run is whole or while it has nothing to keep."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint aside, make sure it is on disk, rename it, and drop all but the last ones."""
        from safetensors.torch import save_file

        tensors = checkpoint.on_cpu.tensors
        target = self.folder / f"checkpoint-{checkpoint.step:09d}.safetensors"
        partial = target.with_suffix(".partial")
        save_file(
            tensors, partial, {"run": self.run, "step": str(checkpoint.step), "digest": _digest(tensors, checkpoint.step)}
        )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(target)
        self._sync_folder()
        for old in self.paths[:-_KEPT]:
            old.unlink()
        return target

    def _sync_folder(self) -> None:
        """Make sure that a new name outlives a power cut."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(path for path in self.folder.glob("checkpoint-*.safetensors") if path.is_file())

    def load(self, device: torch.device | str) -> tuple[Checkpoint | None, list[str]]:
        """The last checkpoint that is sound, and a line for each later one that was refused."""
        refused: list[str] = []
        for path in reversed(self.paths):
            try:
                return self._read(path, device), refused
            except DamagedError as error:
                refused.append(f"checkpoint {path.name} is not used: {error}")
        return None, refused

    def _read(self, path: Path, device: torch.device | str) -> Checkpoint:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            step = int(about.get("step", ""))
        except (OSError, SafetensorError, ValueError) as error:
            raise DamagedError(f"it cannot be read ({error})") from error
        if about.get("run") != self.run:
            raise DamagedError("it belongs to another run, with another recipe or device")
        if about.get("digest") != _digest(tensors, step):
            raise DamagedError("its content was changed after it was written")
        return Checkpoint(step, {name: value.to(device) for name, value in tensors.items()})


def _digest(tensors: Mapping[str, Tensor], step: int) -> str:
    digest = hashlib.sha256(json.dumps(step).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
