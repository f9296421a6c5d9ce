"""Which models normscope opens: a tiny random model of every type of the installed transformers, checked against plain torch.

    python benchmarks/coverage.py                     # all types; writes docs/results/coverage.md
    python benchmarks/coverage.py --only llama t5     # these types, printed, nothing is written

Every type is one row for each of its residual streams: what the model offers, the scheme, the error of the reconstructed block,
and the agreement of hidden states, q, k, v (or attention weights) and scheme with ``reference``, which does not use normscope.
Rows are saved: an interrupted run resumes, and changed code starts anew. Workers are separate processes; one that
crashes or hangs costs the row that it was at.
"""

import argparse
import csv
import hashlib
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

MAPPINGS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders of text, and models of text and sound",
    "speech": "Encoder-decoders of speech",
    "image": "Image classifiers",
    "vision": "Image and video encoders, and pairs of towers",
}
GOOD = 1e-4  # relative error of float32 states, q, k, v and weights
HANGS = 90.0  # seconds without a row until a worker is stopped
LOST = f"the process crashed, or took more than {HANGS:g} s"
Key = tuple[str, str]
Work = Callable[[Sequence[Key], Path], None]
PEERS_FILE = ROOT / "docs/results/data/coverage-peers.csv"


@dataclass
class Row:
    """One residual stream of a model type."""

    mapping: str
    type: str
    built: str = "yes"
    raised: str = ""
    refused: str = ""
    stream: str = ""
    layers: int = 0
    offers: tuple[str, ...] = ()
    softmax: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    scheme: str = ""
    note: str = ""
    reconstruction: float | None = None
    states: float | None = None
    qkv: float | None = None
    checked: int = 0
    wrong: str = ""
    seconds: float = 0.0

    @property
    def opened(self) -> bool:
        """Whether hidden states are offered, and are those of plain hooks."""
        return "stream" in self.offers and self.states is not None and self.states < GOOD

    @property
    def attends(self) -> bool:
        """Whether all softmax attention of the stream is offered and is that of torch."""
        return set(self.softmax) <= set(self.attention) and self.qkv is not None and self.qkv < GOOD


def rows_of(mapping: str, model_type: str) -> list[Row]:
    """Build a type, record it with plain torch, open it with normscope, and compare."""
    import torch

    from helpers.tiny_models import tiny_inputs, tiny_model
    from reference import reference

    began, row = time.perf_counter(), Row(mapping, model_type)
    try:
        model: Any = tiny_model(model_type, mapping)
        inputs = tiny_inputs(model)
        cache = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
        with torch.no_grad():
            model(**inputs, **cache)
    except Exception as error:
        return [Row(mapping, model_type, built=_first_line(error))]
    torch.manual_seed(0)
    plain = reference(model, lambda: model(**inputs, **cache))
    softmax = bool(plain.attentions)
    from normscope.errors import InputError
    from normscope.models import open_model

    rows, waiting = [], [None]
    while waiting:
        row = Row(mapping, model_type, softmax=(0,) if softmax else ())
        try:
            name = waiting.pop()
            view = open_model(model) if name is None else open_model(model, stream=name)
            row.stream = getattr(view, "stream", "")
            if name is None:
                waiting += [other for other in getattr(view, "streams", ()) if other != row.stream]
            _fill(row, view, model, inputs, plain)
        except InputError as error:
            row.refused = _first_line(error)
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "normscope" in frame.filename]
            where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            row.raised = f"{type(error).__name__}: {_first_line(error)}{where}"
        row.seconds = time.perf_counter() - began
        rows.append(row)
    return rows


def _fill(row: Row, view: Any, model: Any, inputs: dict[str, Any], plain: Any) -> None:
    """What a view offers, and how it agrees with the plain pass."""
    import torch

    from normscope.models import Observer

    row.layers, row.offers, row.note = view.layers, tuple(sorted(view.offers)), view.scheme_note
    row.attention = tuple(view.attention_layers) if "attention" in view.offers else ()
    schemes = {scheme.name if scheme is not None else "unclear" for scheme in view.schemes}
    row.scheme = ", ".join(sorted(schemes))
    errors = [error for error in view.reconstruction if error is not None]
    row.reconstruction = max(errors) if errors else None
    states: dict[int, Any] = {}
    steps: dict[int, Any] = {}

    def keep(layer: int, x: Any) -> None:
        states[layer] = x.clone()

    def attend(step: Any) -> None:
        steps[step.layer] = (step.q.clone(), step.k.clone(), step.v.clone(), step.weights())

    attention = attend if "attention" in view.offers else None
    torch.manual_seed(0)  # some models drop patches at random
    view.forward(_sample(view, inputs), Observer(state=keep, attention=attention))
    blocks, row.states = _matching(states, view.layers, plain.lists(model))
    row.softmax = tuple(layer for layer, block in enumerate(blocks) if plain.attentions_of(block))
    errors = [_attention_error(steps[layer], plain.attentions_of(blocks[layer])) for layer in row.softmax if layer in steps]
    row.qkv = max(errors) if errors else None
    from reference import contradiction

    entries = {norm.layer for norm in view.norms if norm.slot == "entry"}
    for layer, (scheme, block) in enumerate(zip(view.schemes, blocks, strict=False)):
        shifted = layer + 1 in entries or (layer == view.layers - 1 and layer in entries)
        given = (layer, view.layers, len(view.sublayers(layer)), layer in entries, shifted)
        wrong = None if scheme is None else contradiction(scheme, plain, block, *given)
        row.checked += wrong is not None
        row.wrong = row.wrong or (f"layer {layer}: {wrong}" if wrong else "")


def _sample(view: Any, inputs: dict[str, Any]) -> Any:
    """The inputs as a sample: features where the model reads them, and tokens."""
    from dataclasses import replace

    from normscope.models import Sample

    features = next((value for value in inputs.values() if value.is_floating_point()), None)
    tokens = next((value for value in inputs.values() if not value.is_floating_point() and value.ndim == 2), None)
    if features is None:
        return view.batch(tokens)
    return view.batch(features) if tokens is None else replace(Sample.of(tokens), features=features)


def _matching(states: dict[int, Any], layers: int, lists: dict[str, list[Any]]) -> tuple[list[Any], float]:
    """The calls of blocks whose states are those of the view, and the largest error; blocks may be in several lists."""
    from reference import states_error

    calls = [call for block in lists.values() for call in block if call.inputs and call.outputs]
    blocks, errors = [], [0.0]
    for layer in range(layers):
        x, y = states.get(layer), states.get(layer + 1)
        if x is None or y is None:
            return [], float("inf")
        scored = []
        for call in calls:
            before, after = (min(states_error(t, s) for t in tensors) for tensors, s in ((call.inputs, x), (call.outputs, y)))
            scored.append((round(before, 6), round(after, 6), -call.ended, before, after, call))
        *_, before, after, call = min(scored, key=lambda item: item[:3])
        blocks.append(call)
        errors += [before, after] if layer == layers - 1 else [before]  # what a model adds between blocks is no block's output
    return blocks, max(errors)


def _attention_error(step: tuple[Any, ...], attentions: Sequence[Any]) -> float:
    """The error of q, k and v against torch's function, of the weights where a softmax was seen; of the best attention."""
    from reference import error_between

    errors = []
    for attention in attentions:
        if attention.weights is not None:
            weights, keys = step[3], step[3].shape[-1]
            sink = attention.weights.shape[-1] == keys + 1  # whose weight goes to no key
            errors.append(error_between(weights, attention.weights[..., :keys] if sink else attention.weights))
            errors.append(error_between(weights / weights.sum(-1, keepdim=True), attention.weights))  # a sink after the softmax
            continue
        shared = step[1].shape[1] // max(attention.k.shape[1], 1)
        k, v = (x.repeat_interleave(max(shared, 1), 1) for x in (attention.k, attention.v))
        scale = (attention.q.double().norm() / step[0].double().norm()).item()  # some modules scale q themselves
        errors.append(max(error_between(a, b) for a, b in ((scale * step[0], attention.q), (step[1], k), (step[2], v))))
    return min(errors, default=float("inf"))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:200] or type(error).__name__


def work(keys: Sequence[Key], folder: Path) -> None:
    """Write the rows of some types, a file for each type."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    for mapping, model_type in keys:
        _write((mapping, model_type), rows_of(mapping, model_type), folder)


def collect(keys: Sequence[Key], folder: Path, workers: int) -> list[Row]:
    """The rows of all types: those that are in the folder already, and the others by worker processes."""
    collect_files(keys, folder, workers, work, [asdict(Row("", "", raised=LOST))])
    return [row for key in keys for row in _read(key, folder)]


def collect_files(keys: Sequence[Key], folder: Path, workers: int, work: Work, lost: Any) -> None:
    """A file for every type, by worker processes; ``lost`` is the content for a type whose process crashed or hung."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [key for key in keys if not _file(key, folder).exists()]
    crews = [Crew(waiting[number::workers], folder, work, lost) for number in range(workers)]
    while max([crew.goes_on() for crew in crews], default=False):  # all of them, each time
        left = sum(len(crew.keys) for crew in crews)
        print(f"{len(keys) - left} of {len(keys)} types", file=sys.stderr, flush=True)
        time.sleep(5.0)


class Crew:
    """A worker process for some types, replaced when it crashes or hangs."""

    def __init__(self, keys: Sequence[Key], folder: Path, work: Work, lost: Any) -> None:
        self.keys, self.folder, self.work, self.lost = list(keys), folder, work, lost
        self.process: Any = None
        self.since = 0.0

    def goes_on(self) -> bool:
        """Start, check or replace the worker; False when all types are done."""
        left = [key for key in self.keys if not _file(key, self.folder).exists()]
        if len(left) < len(self.keys):
            self.keys, self.since = left, time.time()
        if self.process is not None and (not self.process.is_alive() or time.time() - self.since > HANGS):
            self.process.kill()
            self.process.join()
            if self.keys:
                _file(self.keys.pop(0), self.folder).write_text(json.dumps(self.lost))
            self.process = None
        if self.keys and self.process is None:
            self.process = multiprocessing.get_context("spawn").Process(target=self.work, args=(self.keys, self.folder))
            self.process.start()
            self.since = time.time()
        return bool(self.keys) or (self.process is not None and self.process.is_alive())


def _file(key: Key, folder: Path) -> Path:
    return folder / f"{key[0]}.{key[1]}.json"


def _write(key: Key, rows: Sequence[Row], folder: Path) -> None:
    part = _file(key, folder).with_suffix(".part")
    part.write_text(json.dumps([asdict(row) for row in rows]))
    part.replace(_file(key, folder))


def _read(key: Key, folder: Path) -> list[Row]:
    return [Row(**{**row, "mapping": key[0], "type": key[1]}) for row in json.loads(_file(key, folder).read_text())]


def _digest() -> str:
    """Of the code that rows depend on, and of the versions of the libraries."""
    import torch
    import transformers

    folders = (ROOT / "src/normscope/models", ROOT / "src/normscope/core", ROOT / "src/normscope/schemes")
    files = [
        *(file for folder in folders for file in sorted(folder.rglob("*.py"))),
        *sorted((ROOT / "benchmarks").glob("*.py")),
    ]
    files.append(ROOT / "tests/helpers/tiny_models.py")
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def totals(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """What was reached and of how many, by goal."""
    made = [row for row in rows if row.built == "yes"]
    softmax = [row for row in made if row.softmax]
    known = [row for row in made if row.scheme and "unclear" not in row.scheme]
    return {
        "stream": (sum(row.opened for row in made), len(made)),
        "attention": (sum(row.attends for row in softmax), len(softmax)),
        "vocabulary": (sum("vocabulary" in row.offers for row in made), len(made)),
        "scheme": (len(known), len(made)),
        "exceptions": (sum(bool(row.raised) for row in made), len(made)),
        "wrong scheme": (sum(bool(row.wrong) for row in made), len(made)),
    }


def report(rows: Sequence[Row]) -> str:
    """The page docs/results/coverage.md."""
    import torch
    import transformers

    lines = [
        "# Coverage of model types",
        "",
        "Written by `benchmarks/coverage.py`: a tiny random model of every type in the mappings of "
        f"transformers {transformers.__version__} (torch {torch.__version__}), one row for each residual stream.",
        "Hidden states are compared with plain forward hooks, q, k, v with the arguments of `scaled_dot_product_attention` (or",
        "the weights with the softmax of modules that compute it themselves), the scheme with the norms and sums of the block",
        "by hand (`benchmarks/reference.py`, which does not use what it checks). Errors are relative, in float32.",
        "",
        "| mapping | types | built | streams | stream | attention | vocabulary | scheme | exceptions | wrong scheme |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    groups = {mapping: [row for row in rows if row.mapping == mapping] for mapping in MAPPINGS}
    for mapping, group in [*groups.items(), ("all", list(rows))]:
        if group:
            lines.append(f"| {mapping} | {_summary(group)} |")
    lines += ["", f"Goals: {_goals(rows)}", ""]
    peers = _peers()
    lines += _peer_lines(rows, peers)
    for mapping, group in groups.items():
        if group:
            lines += [f"## {MAPPINGS[mapping]}", "", *_table(group, peers), ""]
    return "\n".join(lines + _failures(rows)) + "\n"


def _peers() -> dict[Key, dict[str, str]]:
    """What other tools do with a type, as ``coverage_peers.py`` wrote it."""
    if not PEERS_FILE.exists():
        return {}
    with PEERS_FILE.open(newline="") as file:
        return {(row["mapping"], row["type"]): row for row in csv.DictReader(file)}


def _peer_lines(rows: Sequence[Row], peers: dict[Key, dict[str, str]]) -> list[str]:
    """How many types have the right hidden states in each tool."""
    if not peers:
        return []
    lines = [
        "Types whose hidden states before every block are those of plain hooks (`benchmarks/coverage_peers.py`).",
        "TransformerLens 4.3.0 knows architectures by name. nnsight 0.8.1 was given the names of the blocks, and leaves what",
        "they do to its user.",
        "",
        "| mapping | built | normscope | TransformerLens | nnsight |",
        "| --- | --: | --: | --: | --: |",
    ]
    for mapping in MAPPINGS:
        keys = {(row.mapping, row.type) for row in rows if row.mapping == mapping and row.built == "yes"}
        if not keys or len(keys - peers.keys()) > len(keys) // 20:  # not tried
            continue
        own = {key for key in keys if all(row.opened for row in rows if (row.mapping, row.type) == key)}
        other = [sum(peers.get(key, {}).get(tool) == "yes" for key in keys) for tool in ("transformer_lens", "nnsight")]
        lines.append(f"| {mapping} | {len(keys)} | {len(own)} | {other[0]} | {other[1]} |")
    return [*lines, ""]


def _summary(rows: Sequence[Row]) -> str:
    types = {(row.mapping, row.type) for row in rows}
    built = {(row.mapping, row.type) for row in rows if row.built == "yes"}
    reached = totals(rows)
    shares = [
        f"{part} of {whole}"
        for name, (part, whole) in reached.items()
        if name in ("stream", "attention", "vocabulary", "scheme")
    ]
    counts = [str(reached[name][0]) for name in ("exceptions", "wrong scheme")]
    return " | ".join([str(len(types)), str(len(built)), str(reached["stream"][1]), *shares, *counts])


def _goals(rows: Sequence[Row]) -> str:
    reached = totals(rows)

    def share(name: str) -> float:
        part, whole = reached[name]
        return 100 * part / max(whole, 1)

    return (
        f"stream {share('stream'):.2f} % (goal 98 %), attention {share('attention'):.2f} % of streams with softmax attention "
        f"(goal 90 %), {reached['exceptions'][0]} exceptions (goal 0), {reached['wrong scheme'][0]} wrong schemes (goal 0)."
    )


def _table(rows: Sequence[Row], peers: dict[Key, dict[str, str]]) -> list[str]:
    lines = [
        "| type | stream | layers | attention | vocabulary | scheme | reconstruction | states | q, k, v | scheme by hand "
        "| TransformerLens | nnsight |",
        "| --- | --- | --: | --- | --- | --- | --: | --: | --: | --- | --- | --- |",
    ]
    for row in rows:
        if row.built != "yes":
            lines.append(f"| {row.type} | not built: {_cell(row.built)} | | | | | | | | | | |")
        elif row.raised or row.refused:
            lines.append(f"| {row.type} | {_cell(row.raised or row.refused)} | | | | | | | | {_peer_cells(row, peers)} |")
        else:
            attention = f"{len(row.attention)} of {len(row.softmax)}" if row.softmax else "no softmax"
            scheme = row.scheme + (f" ({_cell(row.note)})" if "unclear" in row.scheme else "")
            checked = row.wrong or (
                "agrees" if row.checked == row.layers else f"{row.checked} layers agree" * bool(row.checked)
            )
            cells = [row.stream or "yes", row.layers, attention, "yes" if "vocabulary" in row.offers else "no", scheme]
            cells += [_number(row.reconstruction), _number(row.states), _number(row.qkv), checked]
            lines.append(f"| {row.type} | " + " | ".join(map(str, cells)) + f" | {_peer_cells(row, peers)} |")
    return lines


def _peer_cells(row: Row, peers: dict[Key, dict[str, str]]) -> str:
    found = peers.get((row.mapping, row.type), {})
    return " | ".join(found.get(tool, "") for tool in ("transformer_lens", "nnsight"))


def _failures(rows: Sequence[Row]) -> list[str]:
    """What did not go well, by kind."""
    made = [row for row in rows if row.built == "yes"]
    opened = [row for row in made if not row.raised and not row.refused]
    kinds = {
        "Exceptions": [(row, row.raised) for row in made if row.raised],
        "Refused": [(row, row.refused) for row in made if row.refused],
        "Hidden states that are not those of plain hooks": [(row, _number(row.states)) for row in opened if not row.opened],
        "Softmax attention that is not offered": [
            (row, f"{len(row.attention)} of {len(row.softmax)} layers")
            for row in opened
            if set(row.softmax) - set(row.attention)
        ],
        "q, k, v or weights that are not torch's": [
            (row, _number(row.qkv)) for row in opened if row.softmax and row.attention and not (row.qkv or 0.0) < GOOD
        ],
        "Wrong schemes": [(row, f"{row.scheme}: {row.wrong}") for row in opened if row.wrong],
        "Unclear schemes": [(row, row.note) for row in opened if "unclear" in row.scheme],
        "Not built": [(row, row.built) for row in rows if row.built != "yes"],
    }
    lines = ["## What is missing, by kind", ""]
    for kind, failed in kinds.items():
        if failed:
            reasons = Counter(_general(reason) for _, reason in failed)
            lines += [f"**{kind}** ({len(failed)})", ""]
            for reason, count in reasons.most_common():
                names = [f"{row.type} ({row.mapping}{_of(row.stream)})" for row, why in failed if _general(why) == reason]
                lines.append(f"- {count}: {_cell(reason)}: {', '.join(names)}")
            lines.append("")
    return lines


def _general(reason: str) -> str:
    """A reason without the names of classes and the sizes of tensors."""
    return re.sub(r"'\w*'|\b\w*(For[A-Z]|Model|Config|LMHead)\w*|\[[\d, ]+\]", "…", reason)


def _of(stream: str) -> str:
    return f", {stream}" if stream else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def main() -> None:
    """Parse the command line, collect the rows, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types; the page is printed, not written")
    parser.add_argument("--mapping", nargs="+", choices=MAPPINGS, default=list(MAPPINGS), help="these mappings")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/coverage.md", help="the page")
    parser.add_argument("--rows", type=Path, help="where rows are kept (default: a temporary folder for this code)")
    options = parser.parse_args()
    from helpers.tiny_models import model_types

    folder = options.rows or Path(tempfile.gettempdir()) / f"normscope-coverage-{_digest()}"
    chosen = [(mapping, name) for mapping in options.mapping for name in model_types(mapping)]
    keys = [key for key in chosen if not options.only or key[1] in options.only]
    rows = collect(keys, folder, min(options.workers, len(keys)))
    page = report(rows)
    print(page if options.only else "\n".join(line for line in page.splitlines()[7:20]))
    if not options.only:
        options.output.write_text(page)


if __name__ == "__main__":
    main()
