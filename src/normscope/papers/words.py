"""Paper 3: embeddings, query-key and value-output probes, singular vectors and a trajectory, of GPT-2 or another model."""

import tomllib
import unicodedata
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import resources
from typing import Any

import pandas as pd
import torch

from normscope.core.norms import length
from normscope.errors import InputError
from normscope.experiments.result import Result
from normscope.experiments.words import Words
from normscope.models import Model, open_model
from normscope.papers.entry import NO_NUMBERS, NOT_RUN, Curve, Entry, Panel, Reproduction, Request, Value, judge
from normscope.results.tables import plain_rows

_DEFAULT = "package:smollm2"
_GPT2 = {"layers": 12, "heads": 12, "dim": 768, "vocabulary": 50257}
_SENTENCE = "To kill two birds with one stone"
_OTHER = (
    "Published for GPT-2, which is not among the packages of the Python index: a user who has it gives --model gpt2. What was "
    "measured here is another model, beside the published values and not compared with them."
)
_DISTANCES = {  # setting → mean and standard deviation of the ℓ2 and the cosine distance, as published
    "original": (23.747, 0.432, 0.0, 0.0),
    "centred": (24.872, 0.432, 0.150, 0.035),
    "scaled": (2.413, 1.862, 0.0, 0.0),
    "centred and scaled": (14.591, 1.469, 0.150, 0.035),
}
_MEAN_NORM = 3.959
_TOP = ("the", ",", "and", "a", "in")  # top 5 by scaled norm and bias
_SAME = (1, 5, 10)  # heads of block 0 that return the word itself
_EXAMPLES = {(7, "time"): ("Show", "bed", "Movie"), (3, "world"): ("under", "Nether", "Fort")}  # head and word → nearest keys
_SCORED = "Every head of the block is scored over 100 nouns, beside random weights of the same spectrum (docs/words.md)."
_PUNCTUATION, _IDENTITY = "punctuation", "near-identity"
_THEMES = {  # head of block 11 → what its singular vectors are said to hold
    1: "gender words", 2: "places", 3: "jobs and industries", 8: _PUNCTUATION, 10: "names", 11: _IDENTITY,
}  # fmt: skip
_VECTORS = 16  # of each head
_FEWEST = 3  # tokens of a theme that a head leads with; one or two of 80 come up by chance
_ROWS = 4096  # embeddings that are converted to float64 at a time
_LABELS = {
    "meaning-preserving": "heads that preserve the word's meaning more than random weights do",
    "precedence": "heads that return what precedes or follows the word more than random weights do",
    "none": "heads that do neither",
}
_BROKEN = "\ufffd"  # in place of the bytes of a token that are no character


@lru_cache(maxsize=1)
def _model(name: str, device: str) -> Model:
    """The model, opened once for all entries that measure it."""
    return open_model(name, device)


@dataclass(frozen=True)
class _Probed:
    """A probe of a model, whether the model has the shape of GPT-2, and what was probed."""

    result: Result
    gpt2: bool
    settings: str


def _run(request: Request, probe: str, text: str | None = None, block: str = "", **settings: Any) -> _Probed:
    """A probe of the model, of all of it or of the first, the middle or the last block."""
    if len(request.models) > 1:
        raise InputError(f"model={','.join(request.models)}: figures of paper 3 are of one model; give one of them")
    model = _model(request.models[0] if request.models else _DEFAULT, request.device)
    where = ""
    if block:
        last = model.layers - 1
        settings["layer"] = {"first": 0, "middle": last // 2, "last": last}[block]  # 0, 5 and 11 of GPT-2
        where = f"; block {settings['layer']} of 0 to {last}"
    given = {"seed": request.seed, "device": request.device, **({"text": text} if text else {}), **settings}
    result = request.run(Words(model=model, probe=probe, **given))
    gpt2 = all(getattr(model, name) == size for name, size in _GPT2.items())
    return _Probed(result, gpt2, result.summary + where)


def _finish(
    probed: _Probed, values: list[Value], remark: str, panels: tuple[Panel, ...] = (), ours: bool = False
) -> Reproduction:
    """Compared where the model is GPT-2; else published values stand beside those of another model.

    ``ours``: the criteria of what is compared are ours, which is a remark.
    """
    if not probed.gpt2:
        values = [replace(value, allowed=None) for value in values]
    text = " ".join(filter(None, ("" if probed.gpt2 else _OTHER, remark)))
    verdict = judge(values, remark=ours) if probed.gpt2 else NOT_RUN
    return Reproduction(verdict, text, probed.settings, tuple(values), panels=panels)


def distances(request: Request) -> Reproduction:
    """ℓ2 and cosine distance between the normalised embeddings and the embeddings, as they are, centred and scaled."""
    probed = _run(request, "embeddings")
    embeddings = _model(request.models[0] if request.models else _DEFAULT, request.device).embeddings
    norm = float(torch.cat([length(rows.double()) for rows in torch.split(embeddings, _ROWS)]).mean())
    values = [Value("mean norm of embeddings", _MEAN_NORM, norm, allowed=0.001)]
    for row in plain_rows(probed.result.tables["distances"]):
        l2, l2_std, cosine, cosine_std = _DISTANCES[row["setting"]]
        for what, published, own in (
            ("mean ℓ2", l2, row["l2_mean"]), ("std of ℓ2", l2_std, row["l2_std"]),
            ("mean cosine distance", cosine, row["cosine_mean"]), ("std of the cosine distance", cosine_std, row["cosine_std"]),
        ):  # fmt: skip
            values.append(Value(f"{row['setting']}: {what}", published, own, allowed=0.001))
    return _finish(probed, values, "Distances below 0.001 are published as such and stand as 0.")


def extremes(request: Request) -> Reproduction:
    """Tokens at the top and bottom by norm, and by norm and bias score with and without the gain of the final norm."""
    probed = _run(request, "embeddings")
    table = probed.result.tables["extremes"]
    values = []
    for (score, end), rows in table.groupby(["score", "end"], sort=False):
        tokens = [str(text).strip() for text in rows.sort_values("rank")["text"]]
        published = ", ".join(f"“{token}”" for token in _TOP) if _is_published(str(score), str(end), table) else None
        listed = ", ".join(f"“{token}”" for token in tokens[:5])
        values.append(Value(f"{score}, {end} 5", published, listed, allowed=0.0 if published else None))
    return _finish(probed, values, "Of the published table the package holds one column: the top 5 by scaled norm and bias.")


def _is_published(score: str, end: str, table: pd.DataFrame) -> bool:
    return end == "top" and score == str(table["score"].iloc[-1])  # the last score has both the gain and the bias


def queries(block: str, request: Request) -> Reproduction:
    """What the heads of a block attend to, for words: nearest keys, and the scores of heads over 100 nouns."""
    probed = _run(request, "queries", block=block)
    result = probed.result
    nearest, values = result.tables["nearest"], _scores(result)
    if block == "first":
        values += _same_words(result.tables["heads"]) if "heads" in result.tables else []
        for head in _SAME:
            if own := _nearest(nearest, head, "time"):
                values.append(Value(f"head {head}: “time” → nearest key", "time", own[0].lower()))
        for (head, word), published in _EXAMPLES.items():
            own = _nearest(nearest, head, word)
            values.append(Value(f"head {head}: “{word}” → nearest keys", ", ".join(published), ", ".join(own[:3]) or None))
    return _block_outcome(probed, values, block)


def value_outputs(block: str, request: Request) -> Reproduction:
    """What the heads of a block write, for words: nearest tokens after the update, and the scores of heads over 100 nouns."""
    probed = _run(request, "values", block=block)
    result = probed.result
    values = _scores(result)
    for word in ("time", "world"):
        rows = result.tables["nearest"]
        together = rows[rows["head"].isna() & (rows["word"] == word)].sort_values("rank")["nearest_text"]
        tokens = ", ".join(str(text).strip() for text in together[:3])
        values.append(Value(f"sum of heads: “{word}” → nearest values", None, tokens, allowed=None))
    norms = result.tables["updates"]
    largest = norms[norms["head"].notna()].groupby("head")["norm"].mean().max()
    values.append(Value("largest mean norm of a head's update", None, float(largest), allowed=None))
    return _block_outcome(probed, values, block)


def _scores(result: Result) -> list[Value]:
    """How many heads preserve the word's meaning, or give what goes before or after it, more than random weights do."""
    if "heads" not in result.tables:
        return []
    labels = result.tables["heads"]["label"]
    counts, total = labels.value_counts(), len(labels)
    return [Value(f"{what}, of {total}", None, float(counts.get(kind, 0)), allowed=None) for kind, what in _LABELS.items()]


def _same_words(heads: pd.DataFrame) -> list[Value]:
    """Whether the heads that the paper reports to return the word itself do so for most nouns; and how many heads do."""
    most = (heads["same"] > 0.5).sum()
    values = [Value("heads that return the word itself for most nouns", None, float(most), allowed=None)]
    for row in plain_rows(heads[heads["head"].isin(_SAME)].sort_values("head")):
        own, random, head = 100 * row["same"], 100 * row["same_random"], f"head {row['head']}"
        values += [
            Value(f"{head}: returns the word itself for most nouns", "yes", "yes" if own > 50 else "no"),
            Value(f"{head}: nouns for which it does, in % (random weights {random:.0f} %)", None, own, allowed=None),
        ]
    return values


def _nearest(table: pd.DataFrame, head: int, word: str) -> list[str]:
    rows = table[(table["head"] == head) & (table["word"] == word)].sort_values("rank")
    return [str(text).strip() for text in rows["nearest_text"]]


def _block_outcome(probed: _Probed, values: list[Value], block: str) -> Reproduction:
    partly = "" if block == "first" else "The package holds no published values of this block."
    remark = " ".join(filter(None, (_SCORED, partly)))
    found = _finish(probed, values, remark, ours=block == "first")
    if probed.gpt2 and not any(value.agrees is not None for value in values):
        return Reproduction(NO_NUMBERS, found.remark, found.settings, found.values)
    return found


def singular(request: Request) -> Reproduction:
    """Tokens nearest to the singular vectors of W_VO of the last block, counted by the themes that the paper reports."""
    probed = _run(request, "singular", block="last", vectors=_VECTORS)
    table, values = probed.result.tables["singular"], []
    counts = theme_counts(table)
    for head, theme in _THEMES.items():
        most = counts[theme].max()
        leading = counts.index[counts[theme] == most] if most >= _FEWEST else []
        named = ", ".join(f"head {each}" for each in leading) or "none"
        values.append(Value(f"{theme}: the head with most of them", f"head {head}", named))
        if len(leading):
            unit, others = "vectors" if theme == _IDENTITY else "tokens", counts[theme].drop(leading).mean()
            what = f"{theme}: {unit} of that head (mean of the others {others:.1f})"
            values.append(Value(what, None, float(most), allowed=None))
    for name, rows in table[(table["side"] == "right") & (table["index"] == 0)].groupby("head"):
        first = ", ".join(str(text).strip() for text in rows.sort_values("rank")["nearest_text"][:5])
        values.append(Value(f"head {name}: tokens that its first right vector writes", None, first, allowed=None))
    remark = (
        f"Published as themes in words (block 11 of GPT-2). Counted are the 5 tokens nearest to each of the first {_VECTORS} "
        "right vectors of a head, by lists of words that are ours (the paper has none); punctuation are tokens of "
        "punctuation marks and symbols; near-identity counts vectors whose nearest key and nearest value are the same word. A "
        f"head with fewer than {_FEWEST} leads in nothing."
    )
    return _finish(probed, values, remark, ours=True)


def theme_counts(table: pd.DataFrame) -> pd.DataFrame:
    """How many tokens that each head's singular vectors write belong to a theme, (heads, themes).

    Args:
        table: of ``normscope words MODEL singular``, the tokens nearest to left (read) and right (written) vectors.
    """
    words = table.assign(word=table["nearest_text"].astype(str).str.strip().str.casefold())
    words = words[~words["word"].str.contains(_BROKEN)]
    written = words[words["side"] == "right"]
    counts = {theme: written["word"].isin(listed).groupby(written["head"]).sum() for theme, listed in _theme_words().items()}
    counts[_PUNCTUATION] = written["word"].map(_is_punctuation).groupby(written["head"]).sum()
    first = words[words["rank"] == 1].pivot(index=["head", "index"], columns="side", values="word")
    same = (first["left"] == first["right"]) & first["left"].str.contains(r"[^\W\d_]", na=False)
    counts[_IDENTITY] = same.groupby("head").sum()
    return pd.DataFrame(counts).reindex(sorted(table["head"].unique()), fill_value=0).fillna(0).astype(int)


def _is_punctuation(word: str) -> bool:
    return bool(word) and all(unicodedata.category(character)[0] in "PS" for character in word)


@lru_cache(maxsize=1)
def _theme_words() -> dict[str, frozenset[str]]:
    text = resources.files("normscope.papers").joinpath("themes.toml").read_text(encoding="utf-8")
    return {theme: frozenset(words.split()) for theme, words in tomllib.loads(text).items()}


def journey(request: Request) -> Reproduction:
    """The trajectory of "one" in the sentence, in the full space."""
    probed = _run(request, "journey", _SENTENCE, token=-2)
    table = probed.result.tables["journey"]
    start, end = str(table["nearest_text"].iloc[0]).strip(), str(table["predicted_text"].iloc[-1]).strip()
    values = [
        Value("nearest embedding at the start", "one", start),
        Value("most probable token at the end", "stone", end),
        Value("angle travelled, in degrees", None, float(table["travelled"].iloc[-1]), allowed=None),
        Value("angle between start and end, in degrees", None, float(table["from_start"].iloc[-1]), allowed=None),
        Value("layers after which “stone” is the most probable token", None, _layers(table), allowed=None),
    ]
    curves = (
        Curve("cosine to “one”", table["layer"], table["cosine_start"]),
        Curve("cosine to the final prediction", table["layer"], table["cosine_predicted"]),
        Curve("probability of “stone”", table["layer"], table["probability"]),
    )
    panel = Panel("Figure 5, in the full space", "layers passed", "cosine, probability", curves)
    remark = (
        "The published picture is a UMAP projection to three dimensions, in which a path can be an artefact; compared are its "
        "two ends, and the path is measured in the full space (normscope words MODEL journey --map umap draws the projection)."
    )
    return _finish(probed, values, remark, (panel,))


def _layers(table: pd.DataFrame) -> str:
    return ", ".join(str(layer) for layer in table[table["rank"] == 1]["layer"]) or "none"


def geometry(figure: str, request: Request) -> Reproduction:
    """Pictures of the norm on points in space, of gain and bias on the circle, and of one head's update."""
    probed = _run(request, "geometry", block="first", word="time")
    values, panels = {"fig2": _norm_points, "fig3": _norm_curves, "fig4": _head_update}[figure](probed.result)
    remark = "A picture without numbers: nothing can be compared. normscope words MODEL geometry draws all three."
    return Reproduction(NO_NUMBERS, remark, probed.settings, tuple(values), panels=tuple(panels))


def _norm_points(result: Result) -> tuple[list[Value], list[Panel]]:
    table = result.tables["norm_points"]
    points = table[table["stage"] == "normalised"][["x", "y", "z"]]
    norms = (points**2).sum(axis=1) ** 0.5
    off = float(points.sum(axis=1).abs().max()) / 3**0.5
    values = [
        Value("norms after LayerNorm in space (√3 = 1.73205)", None, f"{norms.min():.5f} to {norms.max():.5f}", allowed=None),
        Value("largest distance from the plane orthogonal to (1, 1, 1)", None, off, allowed=None),
    ]
    return values, []


def _norm_curves(result: Result) -> tuple[list[Value], list[Panel]]:
    table = result.tables["norm_curves"]
    curves = tuple(Curve(str(stage), rows["x"], rows["y"]) for stage, rows in table.groupby("stage", sort=False))
    return [], [Panel("Gain and bias", "first coordinate", "second coordinate", curves)]


def _head_update(result: Result) -> tuple[list[Value], list[Panel]]:
    table = result.tables["head_update"]
    circle, path = table[table["part"] == "circle"], table[table["part"] != "circle"]
    curves = (
        Curve("sphere", circle["x"], circle["y"]),
        Curve("token, token + update, back on the sphere", path["x"], path["y"]),
    )
    return [], [Panel("One head's update", "along the token", "across it, in the plane of the update", curves)]


def _entry(id: str, title: str, make: Any, probe: str, setting: str = "") -> Entry:
    command = f"normscope words gpt2 {probe}"
    needs = "CPU, up to a minute" + "; GPT-2 for the verdict" * (not setting)
    setting = setting or "GPT-2, 124M parameters: d = 768, 12 layers, 12 heads"
    return Entry(f"3:{id}", title, setting, needs, make, "",
                 (command, f"normscope reproduce 3:{id} --model gpt2"), ("model",))  # fmt: skip


ENTRIES = (
    _entry("table1", "Embeddings and the sphere: distances", distances, "embeddings"),
    _entry("table2", "Extreme tokens by norm and bias", extremes, "embeddings"),
    _entry("table3", "Query → keys, block 0", partial(queries, "first"), "queries --layer 0"),
    _entry("table4", "Key → values, block 0", partial(value_outputs, "first"), "values --layer 0"),
    _entry("tableA1", "Query → keys, block 5", partial(queries, "middle"), "queries --layer 5"),
    _entry("tableA2", "Query → keys, block 11", partial(queries, "last"), "queries --layer 11"),
    _entry("tableA3", "Key → values, block 5", partial(value_outputs, "middle"), "values --layer 5"),
    _entry("tableA4", "Key → values, block 11", partial(value_outputs, "last"), "values --layer 11"),
    _entry("singular", "Singular vectors of W_VO, block 11 (Appendix B)", singular, "singular --layer 11 --matrix vo"),
    *(
        _entry(name, title, partial(geometry, name), "geometry --layer 0 --word time", setting)
        for name, title, setting in (
            ("fig2", "LayerNorm on points in space", "points in three dimensions"),
            ("fig3", "Gain and bias acting on the sphere", "a circle in two dimensions"),
            ("fig4", "One attention head's update", "a sketch"),
        )
    ),
    _entry("fig5", "Trajectory of “one” in “To kill two birds with one stone”", journey, f'journey "{_SENTENCE}" --token -2'),
)
