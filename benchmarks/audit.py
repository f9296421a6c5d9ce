"""What an audit costs, in forward passes of the same model and sample, on random Llamas of 0.1, 1 and 7 billion weights.

    python benchmarks/audit.py --sizes 0.02                  # one small model; about a minute on two cores
    python benchmarks/audit.py --write docs/results          # all sizes, bfloat16 on a GPU; writes audit.md, data/audit.csv

A model is built in memory from its configuration, its queries four times as large as they are drawn: attention is then near
one-hot in places, as in trained models. Its tokenizer knows the words of the bundled text. "Forward pass" is the library's, the
median of five. Every measure is taken by itself, with the forward pass that it observes; the audit shares one pass
between all of them. "Total" is everything a user waits for: opening, all measures, findings, tables and the page.
"""

import argparse
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from normscope.errors import InputError
from normscope.experiments.audit import SENTENCE, Audit, audit_measures
from normscope.measures.sample import sample_text
from normscope.models import Model, open_model

TOKENS = 256
VOCABULARY = 32_000
SHARPER = 4.0
PASSES = 5
SIZES = {  # billions of weights: width, layers, heads, width of the feed-forward layer
    "0.02": (256, 6, 4, 688),
    "0.1": (768, 12, 12, 2048),
    "1": (2048, 16, 16, 5632),
    "7": (4096, 32, 32, 11008),
}
GOALS = {"1": 10.0, "7": 60.0}  # seconds on one H200
MEASURED = "## What was measured"  # the last section of the page
SLOWEST = 12  # functions of a profile


def seconds(work: Callable[[], object], device: str) -> float:
    """The time of a piece of work, on a GPU until it is complete."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def random_llama(size: str, device: str, dtype: torch.dtype) -> Any:
    """A Llama with random weights, built where it runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, hidden = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=hidden,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= SHARPER
    return model.eval().requires_grad_(False)


def word_tokenizer() -> Any:
    """A tokenizer of the words of the bundled text; other ids of the vocabulary are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys(re.findall(r"\w+|[^\w\s]+", f"{sample_text()} {SENTENCE}")))
    vocabulary = ["[UNK]", *words, *map(str, range(10**6, 10**6 + VOCABULARY))][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")  # type: ignore[no-untyped-call]


def measured(size: str, device: str, dtype: torch.dtype, profile: bool) -> Iterator[dict[str, Any]]:
    """A row for each part of the audit of one model: its seconds, and how many forward passes that is."""
    module, tokenizer = random_llama(size, device, dtype), word_tokenizer()
    opened: list[Model] = []
    opening = seconds(lambda: opened.append(open_model(module, tokenizer=tokenizer)), device)
    audit = Audit(model=opened[0], tokens=TOKENS, fresh=True)
    subject = audit.subject()
    tokens = subject.sample.tokens
    with torch.no_grad():
        one = median(seconds(lambda: module(tokens, use_cache=False), device) for _ in range(PASSES + 1))
    parts = {"opening": opening}
    for measure in audit_measures():
        if not measure.missing(subject):
            parts[measure.name] = seconds(lambda own=measure: own.measure(subject), device)  # type: ignore[misc]
            print(f"  {size:>5} {measure.name:<14} {parts[measure.name]:9.2f} s", flush=True)
    if profile:
        print_profile(lambda: audit.measure(subject))
    results: list[Any] = []
    parts["audit, one pass shared"] = seconds(lambda: results.append(audit.measure(subject)), device)
    with tempfile.TemporaryDirectory() as folder:
        parts["tables and page"] = seconds(lambda: results[0].save(Path(folder) / "run", formats=("html",)), device)
    parts["total"] = parts["opening"] + parts["audit, one pass shared"] + parts["tables and page"]
    weights = sum(parameter.numel() for parameter in module.parameters())
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    about = {"billions": size, "weights": weights, "dtype": str(dtype).removeprefix("torch."), "peak_gib": memory}
    yield {**about, "part": "forward pass", "seconds": one, "passes": 1.0}
    for part, taken in parts.items():
        yield {**about, "part": part, "seconds": taken, "passes": taken / one}


def print_profile(work: Callable[[], object]) -> None:
    """The functions that take most of an audit."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(work)
    pstats.Stats(profile).sort_stats("tottime").print_stats(SLOWEST)


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def as_markdown(table: pd.DataFrame, machine: str) -> str:
    """The tables of docs/results/audit.md."""
    lines = [f"Measured on {machine}, {TOKENS} tokens.", ""]
    sizes = list(dict.fromkeys(table["billions"]))
    lines += ["| part | " + " | ".join(f"{size} billion: seconds | passes" for size in sizes) + " |"]
    lines += ["| --- |" + " --- | --- |" * len(sizes)]
    for part in dict.fromkeys(table["part"]):
        cells = []
        for size in sizes:
            row = table[(table["part"] == part) & (table["billions"] == size)]
            cells += ["", ""] if row.empty else [number(row["seconds"].iloc[0]), number(row["passes"].iloc[0])]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.1,1,7", help=f"billions of weights: {', '.join(SIZES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="", help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--write", type=Path, help="the folder of results, docs/results")
    parser.add_argument("--profile", action="store_true", help="print the slowest functions, too")
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if chosen.device == "cuda" else "float32"))
    sizes = chosen.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        raise InputError(f"no model of {unknown[0]} billion weights; there are: {', '.join(SIZES)}")
    if chosen.device == "cuda":  # the first calls load the libraries of the GPU
        list(measured("0.02", chosen.device, dtype, False))
    rows = []
    for size in sizes:
        if chosen.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rows += list(measured(size, chosen.device, dtype, chosen.profile))
        total = rows[-1]["seconds"]
        goal = f" (goal: {GOALS[size]:.0f} s)" if size in GOALS else ""
        print(f"{size} billion weights: {total:.1f} s in all, {rows[-1]['passes']:.0f} forward passes{goal}", flush=True)
    table = pd.DataFrame(rows)
    machine = torch.cuda.get_device_name() if chosen.device == "cuda" else f"{torch.get_num_threads()} threads of a CPU"
    text = as_markdown(table, f"{machine} (torch {torch.__version__}, Python {platform.python_version()})")
    print(text)
    if chosen.write is not None:
        (chosen.write / "data").mkdir(parents=True, exist_ok=True)
        table.to_csv(chosen.write / "data" / "audit.csv", index=False)
        page = chosen.write / "audit.md"
        before = page.read_text(encoding="utf-8").partition(MEASURED)[0] if page.exists() else ""
        page.write_text(f"{before}{MEASURED}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
