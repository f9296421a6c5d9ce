"""A model in text and HTML: scheme per layer, shape, precision, and what it offers."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from normscope.schemes import NORM_TITLES, Scheme

if TYPE_CHECKING:
    from normscope.models.model import Model


def scheme_text(schemes: Sequence[Scheme | None]) -> str:
    """Runs of equal layers: ``layers 0–25: pre; layer 26: post``; a scheme that changes with depth is its own first stage."""
    groups, first = [], 0
    for scheme, run in groupby(schemes):
        last = first + len(list(run)) - 1
        where = layers_named(range(first, last + 1))
        name = "unknown" if scheme is None else f"{scheme.name} (first stage)" if scheme.then else scheme.name
        groups.append(f"{where}: {name}")
        first = last + 1
    return "; ".join(groups)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people list them: ``0, 2–5, 9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def layers_named(numbers: Iterable[int]) -> str:
    """``layer 3``, or ``layers 0, 2–5``."""
    layers = set(numbers)
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"


def size_text(model: "Model") -> str:
    """``30 layers, 9 heads (3 KV heads) of 64, width 576``; heads only where there is attention, and in which layers."""
    shared = "" if model.kv_heads == model.heads else f" ({_count(model.kv_heads, 'KV head')})"
    some = "" if len(model.attention_layers) == model.layers else f" in {layers_named(model.attention_layers)}"
    heads = [f"{_count(model.heads, 'head')}{shared} of {model.head_dim}{some}"] if model.attention_layers else []
    return ", ".join([_count(model.layers, "layer"), *heads, f"width {model.dim:,}"])


def shape_text(model: "Model") -> str:
    """``30 layers, 9 heads (3 KV heads) of 64, width 576, vocabulary 49,152``."""
    return f"{size_text(model)}{f', vocabulary {model.vocabulary:,}' if model.vocabulary else ''}"


def view_text(model: "Model") -> str:
    """The name, with the stream that is viewed where there are several."""
    return f"{model.name} ({model.stream})" if len(model.streams) > 1 else model.name


def rows(model: "Model") -> list[tuple[str, str]]:
    """What a model is, line by line."""
    norms = dict.fromkeys(NORM_TITLES[scheme.norm] for scheme in model.schemes if scheme is not None)
    kinds = f" ({', '.join(norms)})" if norms else ""
    lines = [("stream", f"{model.stream}, of {' and '.join(model.streams)}")] if len(model.streams) > 1 else []
    lines += [("scheme", scheme_text(model.schemes) + kinds)]
    lines += [("", model.scheme_note)] if (model.scheme_note and model.scheme is not None) or None in model.schemes else []
    lines += [
        ("shape", shape_text(model)),
        ("weights", f"{model.parameters:,} parameters, {str(model.dtype).removeprefix('torch.')} on {model.device}"),
        ("offers", ", ".join(sorted(model.offers))),
    ]
    return lines


def why_missing(model: "Model") -> dict[str, str]:
    """For every capability that a model does not offer the reason, the most basic capability first."""
    reasons = {
        "sublayers": "the updates inside its blocks are not identified",
        "attention": "no softmax attention is observed in its layers",
        "matrices": "W_Q, W_K, W_V and W_O of its heads are not identified",
        "vocabulary": "it has no token embeddings as wide as its stream" if model.vocabulary else "it reads no tokens",
        "predictions": "it predicts no tokens",
    }
    offers, known = model.offers, model.reasons
    return {name: known.get(name, reason) for name, reason in reasons.items() if name not in offers}


def as_text(model: "Model") -> str:
    """The rows below the name."""
    return "\n".join([model.name, *(f"  {label:8} {text}" for label, text in rows(model))])


def as_html(model: "Model") -> str:
    """The rows as a table."""
    cells = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows(model))
    return f"<table><caption>{escape(model.name)}</caption><tbody>{cells}</tbody></table>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
