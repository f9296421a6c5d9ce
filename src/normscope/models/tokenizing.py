"""Texts as token ids: which special tokens are added to a text, and whether a tokenizer has a vocabulary at all."""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from normscope.errors import InputError
from normscope.machine.files import read_text

FLAGS = ("add_bos_token", "add_eos_token")
_SENTENCEPIECE = "llama"  # a GGUF file's name for the kind of tokenizer that adds BOS unless the file states otherwise
_SPACES = " ▁Ġ"


def gguf_flags(path: str) -> dict[str, bool]:
    """``add_bos_token`` and ``add_eos_token`` of a GGUF file, as far as it states them; the library does not read them."""
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError:  # before transformers 5.22
        from gguf import GGUFReader

        metadata = {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.endswith("s")}
    else:
        metadata, _ = read_gguf_metadata(path)
    default = {FLAGS[0]: True} if metadata.get("tokenizer.ggml.model") == _SENTENCEPIECE else {}
    return default | {name: bool(metadata[key]) for name in FLAGS if (key := f"tokenizer.ggml.{name}") in metadata}


def config_flags(path: Path | None) -> dict[str, bool]:
    """The same of a ``tokenizer_config.json``; the library leaves them out where there is a ``tokenizer.json``."""
    stated = {} if path is None else json.loads(read_text(path, "configuration of a tokenizer"))  # its integers may be huge
    return {name: stated[name] for name in FLAGS if isinstance(stated.get(name), bool)}


def with_flags(tokenizer: Any, flags: Mapping[str, bool]) -> Any:
    """A tokenizer that nobody else has, adding BOS and EOS as its file states."""
    if not flags:
        return tokenizer
    ids = tokenizer("a", verbose=False)["input_ids"]
    ends = dict(zip(FLAGS, ((tokenizer.bos_token_id, ids[:1]), (tokenizer.eos_token_id, ids[-1:])), strict=True))
    added = {name: token is not None and end == [token] for name, (token, end) in ends.items()}
    wanted = {name: flags.get(name, added[name]) and ends[name][0] is not None for name in FLAGS}
    if wanted != added:
        for name, value in wanted.items():
            setattr(tokenizer, name, value)
    return tokenizer


def is_made_up(tokenizer: Any) -> bool:
    """Whether a tokenizer has special tokens alone: the library makes one up for a model without a vocabulary."""
    special = set(tokenizer.all_special_tokens)
    return not any(token.strip(_SPACES) for token in tokenizer.get_vocab() if token not in special)


def encode(tokenizer: Any, text: str, bos: bool | None = None) -> list[int]:
    """The token ids of a text, special tokens included; ``bos`` adds or removes BOS, whatever the tokenizer does."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    first = tokenizer.bos_token_id
    if bos is None or (first is None and not bos):
        return ids
    if first is None:
        raise InputError("bos=True: the tokenizer has no BOS token")
    bare: list[int] = ids[1:] if ids[:1] == [first] else ids
    return [first, *bare] if bos else bare


def special_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The special tokens at the beginning and at the end of token ids."""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    special = set(tokenizer.all_special_ids) - ({tokenizer.unk_token_id} - set(ends))
    before = list(takewhile(special.__contains__, ids))
    after = list(takewhile(special.__contains__, reversed(ids[len(before) :])))
    return before, after[::-1]
