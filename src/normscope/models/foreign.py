"""Models that others made: which files may be read, whether the hub can be reached, and errors of libraries in one line."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from traceback import walk_tb
from typing import Any

from normscope.errors import InputError, MissingExtraError
from normscope.machine.files import read_json
from normscope.models.tokenizing import config_flags, gguf_flags, is_made_up, with_flags

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
_PROTOCOL_BUFFERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_READERS = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf", "tiktoken": "tiktoken"}  # packages, and modules
_OWN_CODE = "it needs code of its own, which is not run; if you trust whoever wrote it, trust_remote_code=True runs it"
_REACH = 5.0  # seconds for an answer of the hub
_LONGEST = 300  # characters of a library's message


def model_options(name: str, where: str | Path) -> dict[str, Any]:
    """How the library finds a model: a folder as it is, a hub name in the local cache alone if the hub cannot be reached."""
    if Path(where).exists():
        return {}
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(str(where))
    except HFValidationError:
        raise InputError(f"there is no file or folder '{name}', and no model on the Hugging Face hub has such a name") from None
    reason = _unreachable()
    if reason is None:
        return {}
    if _file(where, "config.json", {"local_files_only": True}) is None:
        raise InputError(f"there is no file or folder '{name}' here, and the Hugging Face hub cannot be reached: {reason}")
    return {"local_files_only": True}


def _unreachable() -> str | None:
    """Why the hub does not answer, or None if it does; the library would try for half a minute."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(ENDPOINT, timeout=_REACH)
    except Exception as error:  # the hub's HTTP client is another one from version to version, each with errors of its own
        return in_one_line(error)
    return None


def _file(where: str | Path, name: str, options: dict[str, Any]) -> Path | None:
    """A file of a model, in its folder or in the hub's cache, where it is downloaded to; None if the model has none."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        where,
        name,
        local_files_only=(alone := options.get("local_files_only", False)),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=not alone,  # raised for what is not in the cache
    )
    return None if found is None else Path(found)


def check_weights(name: str, where: str | Path, config: Any, convert: str, options: dict[str, Any]) -> None:
    """Refuse a model whose weights are not safetensors files of its folder, whatever its configuration and index say.

    Args:
        name: the model, for messages.
        where: its folder, or its name on the hub.
        config: its configuration, which may name the file of the weights.
        convert: the class of the library that can convert pickled weights.
        options: how files are found.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    if _file(where, "adapter_config.json", options) is not None:
        raise InputError(f"'{name}' has an adapter (adapter_config.json): merge it into the weights (peft's merge_and_unload)")
    explicit = {str(getattr(part, "transformers_weights", None)) for part in (config, config.get_text_config())} - {"None"}
    named = sorted(explicit) or [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    for part in named:
        _check_name(name, part, "configuration", (".safetensors", ".safetensors.index.json"))
    files = [file for part in named if (file := _file(where, part, options)) is not None]
    if not files:
        raise InputError(_no_weights(name, where, convert, options))
    shards = [shard for file in files if file.name.endswith(".index.json") for shard in _shards(name, file)]
    if Path(where).is_dir():
        for part in (*(file.name for file in files), *shards):
            _check_inside(name, Path(where) / part)
    _check_depth(name, config, files)


def _check_depth(name: str, config: Any, files: list[Path]) -> None:
    """Refuse a configuration with more layers than there are tensors: the library would build them all first."""
    from safetensors import SafetensorError, safe_open

    tensors = 0
    for file in files:
        if file.suffix == ".json":
            tensors += len(read_json(file, "index of weights")["weight_map"])
        else:
            try:
                with safe_open(file, "pt") as content:
                    tensors += len(content.keys())
            except SafetensorError as error:
                raise InputError(f"cannot open '{name}' as a model: {file.name}: {error}") from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > tensors:
        raise InputError(f"the configuration of '{name}' has {layers} layers, but its weights are only {tensors} tensors")


def _shards(name: str, index: Path) -> list[str]:
    """The files that an index of weights names."""
    try:
        shards = sorted({str(shard) for shard in read_json(index, "index of weights")["weight_map"].values()})
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"cannot read '{index}': it is not an index of weights") from error
    for shard in shards:
        _check_name(name, shard, "index", (".safetensors",))
    return shards


def _check_name(name: str, file: str, source: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a name of weights that is not one of a safetensors file in the folder of the file that names it."""
    if Path(file).name != file or "\\" in file or not file.endswith(suffixes):
        raise InputError(f"'{name}' is refused: its {source} names '{file}', which is no safetensors file beside it")


def _check_inside(name: str, file: Path) -> None:
    """Refuse a file that is not there, or a link out of the folder; Hugging Face's cache keeps contents in ``blobs``."""
    if not file.is_file():
        raise InputError(f"the weights of '{name}' are not whole: '{file.name}' is missing")
    target, folder = file.resolve(), file.parent.resolve()
    cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if not cached and not target.is_relative_to(folder):
        raise InputError(f"'{name}' is refused: '{file.name}' is a link out of the folder, to '{target}'; copy that file there")


def _no_weights(name: str, where: str | Path, convert: str, options: dict[str, Any]) -> str:
    """Why a model without safetensors files cannot be opened."""
    folder = Path(where)
    if folder.is_dir():
        pickled = any(file.suffix in PICKLES for file in folder.iterdir())
    else:
        pickled = any(_file(where, part, options) for part in ("pytorch_model.bin.index.json", "pytorch_model.bin"))
    if not pickled:
        return f"'{name}' holds no weights: there is no safetensors file in it"
    return f"the weights of '{name}' are {_conversion(where, convert)}"


def _conversion(where: str | Path, convert: str) -> str:
    """Why pickled weights are refused, and the command that converts them; a head that they lack is not made up."""
    folder = Path(where)
    path, target = str(where), str(folder) if folder.is_dir() else folder.name
    code = (
        f"from transformers import {convert} as M; m, i = M.from_pretrained({json.dumps(path)}, output_loading_info=True); "
        f'(m.base_model if i["missing_keys"] else m).save_pretrained({json.dumps(target)})'
    )
    return _refusal(f"open '{target if folder.is_dir() else f'./{target}'}'", code)


def pickled_file(path: Path) -> str:
    """Why a file of pickled weights is refused, and the command that converts it: with its folder, or alone."""
    what, config = f"the weights in '{path}' are ", path.parent / "config.json"
    if config.is_file():
        content = read_json(config, "configuration")
        named = str((content.get("architectures") or [""])[0]) if isinstance(content, dict) else ""
        return what + _conversion(path.parent, named if named.isidentifier() else "AutoModel")
    source, target = json.dumps(str(path)), json.dumps(str(path.parent / "model.safetensors"))
    code = (
        "import torch; from safetensors.torch import save_file; save_file({k: v.clone() for k, v in "
        f"torch.load({source}, weights_only=True).items()}}, {target})"
    )
    return what + _refusal("put its config.json beside it", code)


def _refusal(then: str, code: str) -> str:
    """The command stands at the end, to be copied."""
    return (
        "pickled, and are refused on purpose: a pickle can run any code. If you trust it, convert it once, and "
        f"{then}: python -c {shlex.quote(code)}"
    )


def read_tokenizer(name: str, where: str | Path, config: Any, trust_remote_code: bool, options: dict[str, Any]) -> Any:
    """The tokenizer beside the weights, adding BOS and EOS as its file states; None if there is none.

    One that is there and cannot be read is an error.
    """
    from transformers import AutoTokenizer

    what = f"cannot read the tokenizer of '{name}': "
    if "gguf_file" not in options:
        with library_errors(what):
            found = (_file(where, part, options) for part in (*_VOCABULARIES, *_PROTOCOL_BUFFERS))
            vocabulary = next((file for file in found if file is not None), None)
        if vocabulary is None:
            return None  # the library would make one up
        if vocabulary.name in _PROTOCOL_BUFFERS and (missing := _missing(_content(vocabulary))):
            raise MissingExtraError(what + missing)  # the library would ask for tiktoken, whatever it is
    with library_errors(what):
        tokenizer = AutoTokenizer.from_pretrained(where, config=config, trust_remote_code=trust_remote_code, **options)
        if is_made_up(tokenizer):
            return None
        gguf = options.get("gguf_file")
        flags = config_flags(_file(where, "tokenizer_config.json", options)) if gguf is None else gguf_flags(gguf)
        return with_flags(tokenizer, flags)


def read_image_processor(name: str, where: str | Path, options: dict[str, Any]) -> Any:
    """The image processor beside the weights, which resizes and normalises pictures; None if there is none."""
    from transformers import AutoImageProcessor

    with library_errors(f"cannot read the image processor of '{name}': "):
        if _file(where, "preprocessor_config.json", options) is None:
            return None
        kind: Any = AutoImageProcessor
        return kind.from_pretrained(where, trust_remote_code=False, **options)


def _content(vocabulary: Path) -> str:
    """What reads a ``.model`` file: sentencepiece a protocol buffer, tiktoken lines of text."""
    with vocabulary.open("rb") as file:
        return "sentencepiece protobuf" if file.read(1) == b"\n" else "tiktoken"  # the tag of the buffer's first field


def _missing(text: str) -> str:
    """Which packages that a text names are to be installed; empty if none is."""
    packages = [package for package, module in _READERS.items() if package in text.lower() and not _installed(module)]
    return f"it needs {' and '.join(packages)}: pip install {' '.join(packages)}" if packages else ""


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """An error of a library as one line; libraries raise of all kinds, from OSError to KeyError. A bug of ours stays one."""
    try:
        with quietly():
            yield
    except InputError:
        raise
    except Exception as error:
        # an operation that a mode of ours passes on is still that of the library
        *_, innermost = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name != "__torch_function__")
        if str(innermost.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]:
            raise
        missing = _missing(str(error))
        reason = _OWN_CODE if "trust_remote_code" in str(error) else missing or in_one_line(error)
        raise (MissingExtraError if missing else InputError)(what + reason) from error


def in_one_line(error: BaseException) -> str:
    """The message of an error, shortened, with its class where the message alone says little."""
    text = " ".join(str(error).split())[:_LONGEST]
    return f"{type(error).__name__} {text}".strip() if isinstance(error, LookupError) or not text else text


@contextmanager
def quietly() -> Iterator[None]:
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
