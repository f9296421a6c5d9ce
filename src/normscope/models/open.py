"""Open a model: a run folder, a folder or hub name of the ``transformers`` library, a GGUF file, or an object in memory."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normscope.errors import InputError, require_known
from normscope.machine.files import MOST_JSON, read_json, regular_file, user_path
from normscope.machine.packages import PREFIX, packaged
from normscope.models.blocks import stream_named
from normscope.models.check import check_finite
from normscope.models.foreign import (
    PICKLES,
    check_weights,
    library_errors,
    model_options,
    pickled_file,
    quietly,
    read_image_processor,
    read_tokenizer,
)
from normscope.models.gguf_reading import need_gguf, read_once
from normscope.models.inputs import accepted, probe_sample
from normscope.models.loading import DISK, DTYPES, planned
from normscope.models.model import Model
from normscope.models.tokenizing import is_made_up
from normscope.models.wrapped import unwrapped
from normscope.transformer import SavedModel, Transformer, load_model
from normscope.transformer.files import model_folder

_OWN = "builtin:"
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification", "Model")
_ENDS = 1 << 20  # bytes at each end of a file that identify it
_CANNOT = "cannot open '{}' as a model: "
_UNUSED = "pooler"  # the sentence vector of an encoder, which nothing here uses


def open_model(
    source: "str | Path | Model | Transformer | SavedModel | nn.Module",
    device: torch.device | str | None = None,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    *,
    dtype: str = "auto",
    stream: str | None = None,
    blocks: str | None = None,
    example: torch.Tensor | None = None,
) -> Model:
    """The model of a name, path or object.

    Args:
        source: a folder that ``normscope train`` wrote, ``builtin:addition-small-pre``, a folder with a model of the
            ``transformers`` library, a GGUF file, ``package:smollm2`` for one that is installed as a Python package, the name
            of a model on the Hugging Face hub, or a model in memory: any ``nn.Module`` with a list of residual blocks, a
            ``transformers.PreTrainedModel``, a ``Transformer`` of normscope, or a ``Model``, which is returned as it is.
        device: where it runs; by default the CPU for a name, and where it is for a model in memory. ``cuda`` takes all GPUs
            for a model that does not fit on the first; ``disk`` reads the weights of every layer when it runs.
        tokenizer: for a ``PreTrainedModel`` in memory, or in place of the one that belongs to a name; False for none. For a
            model of images, the image processor.
        trust_remote_code: whether code that comes with a model of the ``transformers`` library is run. It can do everything
            that you can: only for models whose authors you trust.
        dtype: the precision of its weights, ``bfloat16``, ``float16`` or ``float32``; ``auto`` is as stored on a GPU and
            float32 on a CPU. Statistics are computed in float32 or float64 whatever it is.
        stream: which residual stream is viewed, where a model has several, such as ``encoder`` and ``decoder``; by default
            the decoder, or the stream with the most parameters.
        blocks: the name of the list of blocks, such as ``transformer.h``, where it is not found.
        example: for a module in memory that does not run on token ids: an input that it runs on.

    A model of the ``transformers`` library that does not fit in memory stays on disk. A model in memory keeps its precision,
    its mode and its gradients.

    Raises:
        InputError: if there is no such model, its architecture is not supported, or some of its weights are NaN or infinite.

    Example:
        >>> from normscope.models import open_model
        >>> open_model("builtin:addition-small-pre").schemes[0].name
        'pre'
    """
    view = {"stream": stream, "blocks": blocks, "example": example}
    require_known("dtype", dtype, DTYPES)
    if isinstance(source, str | Path):
        return _open_name(source, device or "cpu", dtype, tokenizer, trust_remote_code, view)
    if dtype != "auto":
        raise InputError(f"dtype={dtype}: a model in memory keeps its precision; convert it before, model.to(torch.{dtype})")
    if isinstance(source, Model):
        return _viewed(source, view)
    source = unwrapped(source) if isinstance(source, nn.Module) else source
    if isinstance(source, Transformer | SavedModel):
        saved = source if isinstance(source, SavedModel) else SavedModel(source, {})
        return _normscope_model(f"transformer-{saved.model.config.scheme.name}", saved, view, device, tokenizer)
    if not isinstance(source, nn.Module):
        raise InputError(f"a {type(source).__name__} is not a model: give a name, a path, or a torch.nn.Module")
    name = str(getattr(getattr(source, "config", None), "_name_or_path", "")) or type(source).__name__
    return _module(name, source if device is None else source.to(device), tokenizer, **view)


def _viewed(model: Model, view: dict[str, Any]) -> Model:
    """A model that is open already, if it has the requested view."""
    _check_known(model.name, view, "it is open already")
    if view["stream"] is not None and stream_named(view["stream"], model.streams) != model.stream:
        raise InputError(f"stream={view['stream']!r}: '{model.name}' was opened at its stream {model.stream}; open it again")
    return model


def _check_known(name: str, view: dict[str, Any], reason: str) -> None:
    for setting in ("blocks", "example"):
        if view[setting] is not None:
            raise InputError(f"{setting}=…: the blocks of '{name}' are known, {reason}; leave {setting} out")


def open_awake(module: nn.Module, **view: Any) -> Model:
    """The model of a module that is about to be trained: learned scales that are still 0 do not hide its structure."""
    from normscope.models.probe import zero_scales_as_one

    model = open_model(module, **view)
    if not any(map(model.unclear, range(model.layers))):
        return model
    with zero_scales_as_one(model.model) as any_zero:
        return open_model(module, **view) if any_zero else model


def _open_name(
    source: str | Path, device: torch.device | str, dtype: str, tokenizer: Any, trust_remote_code: bool, view: dict[str, Any]
) -> Model:
    """The model of a name or path."""
    text, path = str(source), check_model(source)
    if text.startswith(_OWN) or _is_own(path):
        if dtype not in ("auto", "float32") or device == DISK:
            raise InputError(f"'{text}' was trained by normscope: it runs in float32, on a CPU or a GPU")
        folder = model_folder(source)
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = read_tokenizer(text, folder, None, False, {})
        return _normscope_model(text, load_model(source, device), view, tokenizer=tokenizer)
    if path.is_file():
        file = str(path.resolve())  # of a name alone the library takes the file in the working directory
        need_gguf()
        with read_once():
            return _from_library(text, path.parent, device, dtype, tokenizer, False, view, gguf_file=file)
    return _from_library(text, path if path.is_dir() else text, device, dtype, tokenizer, trust_remote_code, view)


def _normscope_model(
    name: str, saved: SavedModel, view: dict[str, Any], device: torch.device | str | None = None, tokenizer: Any = None
) -> Model:
    from normscope.models.normscope_model import NormscopeModel

    _check_known(name, view, "it was trained by normscope")
    zeros = check_finite(name, saved.model)
    saved = saved if device is None else SavedModel(saved.model.to(device), saved.about)
    model = NormscopeModel(name, saved, tokenizer, stream=view["stream"])
    model.zero_weights = zeros
    return model


def check_model(name: str | Path) -> Path:
    """The path of a model, as far as it is known without opening it; what cannot be a model is refused."""
    text, path = str(name), user_path(name, "model")
    if text.startswith(PREFIX):
        path = packaged(text, "model")
    if text.startswith(_OWN):
        path = model_folder(text)
    elif path.suffix in PICKLES and path.is_file():
        raise InputError(pickled_file(path))
    elif path.is_file() and not _is_gguf(path):
        raise InputError(f"'{path}' is not a model: give a folder, or a GGUF file")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"'{path}' holds no model: there is no config.json in it")
    elif path.is_dir():
        _check_files(path)
    elif path.exists() and not path.is_file():
        raise InputError(f"'{path}' is not a model: it is not a regular file")
    elif not path.exists() and (text.startswith((".", "/", "~")) or text.endswith(".gguf") or text.count("/") > 1):
        raise InputError(f"there is no file or folder '{path}'")
    return path


def check_found(name: str) -> None:
    """Refuse also a name that is neither here nor on the hub, from which its configuration is requested; nothing is opened."""
    if not check_model(name).exists():
        _configuration(name, name, False)


def _configuration(name: str, where: str | Path, trust_remote_code: bool, **file: str) -> tuple[Any, dict[str, Any]]:
    """The configuration of a model of the ``transformers`` library, and how its files are found."""
    with library_errors(_CANNOT.format(name)):
        options = {**model_options(name, where), **file}
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **options), options


def _check_files(folder: Path) -> None:
    """Refuse a folder with a FIFO or a link to a device where a library would read a file, and with texts of any size."""
    for file in sorted(folder.iterdir()):
        if not file.is_dir() and file.exists():
            regular_file(file, "file of a model", MOST_JSON if file.suffix in (".json", ".txt") else float("inf"))


def model_digest(name: str) -> str | None:
    """A digest of a model's files here, of large ones their size and both ends; None for a model that is not a file here."""
    path = packaged(name, "model") if name.startswith(PREFIX) else user_path(name)
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
    name = "smollm2"
    try:
        packaged(name, "model")
        need_gguf()
    except InputError as error:
        return f"{_OWN}addition-small-pre", str(error)
    return f"{PREFIX}{name}", None


def _is_own(folder: Path) -> bool:
    """Whether a folder's configuration is one of ours."""
    try:
        content = read_json(folder / "config.json", "configuration")
    except InputError:
        return False
    return isinstance(content, dict) and "format" in content and isinstance(content.get("model"), dict)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _from_library(
    name: str,
    where: str | Path,
    device: torch.device | str,
    dtype: str,
    tokenizer: Any,
    trust_remote_code: bool,
    view: dict[str, Any],
    **file: str,
) -> Model:
    """A model of the ``transformers`` library; weights as safetensors or GGUF, never by unpickling."""
    if trust_remote_code and not file:
        warnings.warn(
            f"code that comes with '{name}' is run: it can do everything that you can (trust_remote_code=True)", stacklevel=4
        )
    config, options = _configuration(name, where, trust_remote_code, **file)
    kind = _class_for(config)
    with library_errors(_CANNOT.format(name)):
        if not file:
            check_weights(name, where, config, kind.__name__, options)
        plan = planned(name, where, config, str(device), dtype, bool(file))
        model, loaded = kind.from_pretrained(
            where,
            config=config,
            output_loading_info=True,
            **plan.options,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",  # a configuration may name a kernel on the hub, which is code
            **({} if file else {"use_safetensors": True}),
            **options,
        )
    missing = sorted(key for key in loaded["missing_keys"] if _UNUSED not in key)
    bare = model.base_model
    if missing and bare is not model and not any(key.startswith(f"{model.base_model_prefix}.") for key in missing):
        warnings.warn(
            f"'{name}' is opened without its head, and predicts nothing: the configuration names {type(model).__name__}, but "
            f"{missing[0]} is not among the weights",
            stacklevel=4,
        )
        model, missing = bare, []
    if missing:
        raise InputError(f"the weights of '{name}' are not whole: {missing[0]} and {len(missing) - 1} others are missing")
    if tokenizer is None:
        tokenizer = read_tokenizer(name, where, config, trust_remote_code, options)
    if not file and "pixel_values" in accepted(model):
        view = {**view, "processor": read_image_processor(name, where, options)}
    model = model if plan.placed else model.to(device)
    model.offload_folder = plan.folder  # which is removed with the model
    return _module(name, model.eval().requires_grad_(False), tokenizer, **view)


def _module(name: str, model: Any, tokenizer: Any, **view: Any) -> Model:
    """A model in memory; one that does not run on a small input is refused."""
    from normscope.models.attention_interface import observable
    from normscope.models.module_model import ModuleModel

    zeros = check_finite(name, model)
    tokenizer = None if not tokenizer or (not hasattr(tokenizer, "preprocess") and is_made_up(tokenizer)) else tokenizer
    refused = f"unsupported architecture: '{name}' ({type(model).__name__}) does not run on a small input: "
    with observable(model):
        if view.get("example") is None:
            view["example"] = probe_sample(model, refused)
        with quietly():
            opened = ModuleModel(name, model, tokenizer, **view)
    opened.zero_weights = zeros
    return opened


def _class_for(config: Any) -> Any:
    """The class with the head that the weights were saved with; the bare model where they have none."""
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM

    saved = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    kind = getattr(transformers, saved, None) if saved.isidentifier() and saved.endswith(_HEADS) else None
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.config_class is type(config):
        return kind
    causal = saved.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    known = type(config) in AutoModelForCausalLM._model_mapping
    own = AutoModelForCausalLM.__name__ in (getattr(config, "auto_map", None) or {})  # code that comes with the model
    return AutoModelForCausalLM if causal and (known or own) else AutoModel
