"""Which of the tiny models of ``coverage.py`` other tools open: TransformerLens and nnsight, where they are installed.

    pip install --no-deps transformer-lens==4.3.0 nnsight==0.8.1 einops fancy_einsum typeguard datasets dill multiprocess xxhash
    python benchmarks/coverage_peers.py      # writes docs/results/data/coverage-peers.csv, which coverage.py puts into its page

A tool has a type if the hidden states before every block are those of plain hooks. TransformerLens is given the model in
memory, and knows architectures by name. nnsight is given the model and the names of its blocks: it does not look for them.
"""

import argparse
import csv
import os
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from coverage import GOOD, MAPPINGS, PEERS_FILE, Key, collect_files

TOOLS = ("transformer_lens", "nnsight")


def peers_of(mapping: str, model_type: str) -> dict[str, str]:
    """``yes``, or why not, for each tool; empty if the type cannot be built."""
    import torch

    from helpers.tiny_models import tiny_inputs, tiny_model
    from reference import reference

    try:
        model: Any = tiny_model(model_type, mapping)
        inputs = tiny_inputs(model)
        torch.manual_seed(0)
        plain = reference(model, lambda: model(**inputs))
    except Exception:  # the library's: the reason is in the page
        return {}
    lists = [calls for calls in plain.lists(model).values() if calls[0].inputs and calls[0].outputs]
    blocks = max(lists, key=lambda calls: sum(p.numel() for call in calls for p in call.module.parameters()), default=[])
    results = {}
    for tool, attempt in zip(TOOLS, (_transformer_lens, _nnsight), strict=True):
        try:
            torch.manual_seed(0)
            error = attempt(model, inputs, blocks, lists)
            results[tool] = "yes" if error < GOOD else "other states"
        except Exception as error:  # the tool's
            results[tool] = f"no: {type(error).__name__}"
    return results


def _transformer_lens(model: Any, inputs: dict[str, Any], blocks: Sequence[Any], lists: Sequence[Any]) -> float:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    from reference import states_error

    copy = deepcopy(model)
    copy.config.architectures = [type(model).__name__]
    bridge = TransformerBridge.boot_transformers("tiny", hf_model=copy, tokenizer=_tokenizer(), device="cpu")
    first, others = next(iter(inputs.values())), dict(list(inputs.items())[1:])
    with torch.no_grad():
        _, cache = bridge.run_with_cache(first, **others)
    names = ("blocks", "decoder_blocks", "encoder_blocks")
    stream = next(name for name in names if f"{name}.0.hook_in" in cache or f"{name}.0.hook_resid_pre" in cache)
    hook = "hook_in" if f"{stream}.0.hook_in" in cache else "hook_resid_pre"
    states = [cache[key] for layer in range(len(cache)) if (key := f"{stream}.{layer}.{hook}") in cache]
    return max(min(states_error(t, x) for calls in lists for call in calls for t in call.inputs) for x in states)


def _tokenizer() -> Any:
    """A tokenizer of one word: TransformerLens needs one, whatever it reads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast
    special = dict.fromkeys(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), "a")
    return made(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), **special)


def _nnsight(model: Any, inputs: dict[str, Any], blocks: Sequence[Any], lists: Sequence[Any]) -> float:
    from nnsight import NNsight

    from reference import states_error

    traced, saved = NNsight(model), []
    names = list(dict.fromkeys(block.name for block in blocks))
    with traced.trace(**inputs):
        for name in names:
            saved.append(traced.get(name).input.save())
    return max(min(states_error(t, x) for block in blocks for t in block.inputs) for x in saved)


def _refuse(*command: Any, **options: Any) -> int:
    """TransformerLens installs torchvision, and with it another torch, when a model reads images: not in this environment."""
    raise RuntimeError(f"not run: {command}")


def work(keys: Sequence[Key], folder: Path) -> None:
    """Write what tools do with some types, a file for each."""
    import json

    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    subprocess.check_call = _refuse
    for mapping, model_type in keys:
        (folder / f"{mapping}.{model_type}.json").write_text(json.dumps(peers_of(mapping, model_type)))


def main() -> None:
    """Try all types, and write the table."""
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path(tempfile.gettempdir()) / "normscope-coverage-peers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mapping", nargs="+", choices=MAPPINGS, default=list(MAPPINGS), help="these mappings")
    options = parser.parse_args()
    from helpers.tiny_models import model_types

    keys = [(mapping, name) for mapping in options.mapping for name in model_types(mapping)]
    collect_files(keys, options.rows, options.workers, work, {})
    with PEERS_FILE.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["mapping", "type", *TOOLS])
        for mapping, name in keys:
            row = json.loads((options.rows / f"{mapping}.{name}.json").read_text())
            if row:
                table.writerow([mapping, name, *(row[tool] for tool in TOOLS)])


if __name__ == "__main__":
    main()
