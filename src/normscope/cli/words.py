"""normscope words: a model's words on the sphere, what its heads do to them, and their journeys."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.output import (
    DeviceOption,
    JsonOption,
    OutOption,
    OverwriteOption,
    SeedOption,
    chosen_device,
    console,
    examples,
    print_folder,
    print_json,
    print_table,
    progress,
    say,
    stages,
    with_report,
)
from normscope.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from normscope.models import Model
    from normscope.words import Word

EXAMPLES = examples(
    "normscope words package:smollm2 embeddings",
    "normscope words gpt2 queries --layer 0 --word time,life,world",
    "normscope words gpt2 values --layer 0,5,11",
    "normscope words gpt2 singular --layer 11 --matrix vo",
    'normscope words package:smollm2 journey "To kill two birds with one stone" --token -2',
    "normscope words package:smollm2 geometry --layer 0 --word time",
)
_USES = {
    "embeddings": set(),
    "queries": {"layer", "head", "word", "nearest", "distance", "scores"},
    "values": {"layer", "head", "word", "nearest", "scores"},
    "singular": {"layer", "head", "nearest", "matrix", "vectors", "distance"},
    "journey": {"text", "token", "map"},
    "geometry": {"layer", "head", "word"},
}
PROBES = tuple(_USES)
_SHOWN_WORDS = 3


def words(
    model: Annotated[
        str, typer.Argument(help="A transformers folder, hub name, GGUF file, run folder, builtin:NAME or package:smollm2.")
    ],
    probe: Annotated[str, typer.Argument(help="embeddings, queries, values, singular, journey or geometry.")],
    text: Annotated[str | None, typer.Argument(help="journey: the text to read.", show_default=False)] = None,
    layer: Annotated[
        str | None,
        typer.Option(help="Layers with commas, the first is 0, −1 the last; or all.", show_default="0; singular: the last"),
    ] = None,
    head: Annotated[str | None, typer.Option(help="Show only these heads, with commas.", show_default="all")] = None,
    word: Annotated[
        str | None,
        typer.Option(help="Words to begin with, each one token, with commas.", show_default="the 100 most common nouns"),
    ] = None,
    nearest: Annotated[int | None, typer.Option(min=1, max=100, help="How many nearest tokens.", show_default="5")] = None,
    matrix: Annotated[str | None, typer.Option(help="singular: vo for W_V W_O, qk for W_Q W_Kᵀ.", show_default="vo")] = None,
    vectors: Annotated[
        int | None, typer.Option(min=1, help="singular: how many vectors of each head.", show_default="5")
    ] = None,
    distance: Annotated[
        int | None,
        typer.Option(min=0, help="Places between query and key, for rotary positions.", show_default="0"),
    ] = None,
    scores: Annotated[
        bool | None, typer.Option(help="Score heads over all words, random weights beside them.", show_default="with 20 words")
    ] = None,
    token: Annotated[int | None, typer.Option(help="journey: which token, from 0 or from the end.", show_default="-2")] = None,
    map: Annotated[str | None, typer.Option(help="journey: sphere, umap or pca.", show_default="sphere")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """A model's words on the sphere, what its heads do to them, and their journeys through the layers."""
    from normscope.models import open_model
    from normscope.report.words import write_words_report
    from normscope.runs import check_writable, fresh_path, new_run, run_path

    given = {
        "text": text, "layer": layer, "head": head, "word": word, "nearest": nearest, "matrix": matrix, "vectors": vectors,
        "distance": distance, "scores": scores, "token": token, "map": map,
    }  # fmt: skip
    _check(probe, given)
    where = chosen_device(device)
    folder = out or fresh_path(f"runs/words-{probe}")
    check_writable(folder, overwrite=overwrite)
    started = datetime.now(UTC)
    with console(stderr=True).status(f"opening {model}"):
        view = open_model(model, where)
    request = _Request(view, probe, {key: value for key, value in given.items() if value is not None}, seed)
    tables = {"notes": request.notes, **_PROBES[probe](request)}
    configuration = {"model": model, "probe": probe, **request.settings}
    said = "; ".join(f"{key} {value}" for key, value in request.settings.items() if not isinstance(value, list | dict))
    with new_run(folder, "words", configuration, seed=seed, device=where, overwrite=overwrite, started=started) as written:
        for name, table in tables.items():
            written.write_table(name, table)
        with_report(lambda: write_words_report(written, "; ".join(filter(None, (model, probe, said, f"seed {seed}")))))
    if json:
        print_json(_records(probe, tables, request))
    else:
        _print(probe, tables, request)
        print_folder(run_path(folder))


def _check(probe: str, given: dict[str, Any]) -> None:
    """Refuse a probe that there is not, options and values that it has no use for, and a journey without a text."""
    from normscope.words import MAPS, MATRICES

    if probe not in _USES:
        raise InputError(f"unknown probe '{probe}'; allowed: {', '.join(PROBES)}{did_you_mean(probe, PROBES)}")
    for name, value in given.items():
        if value is not None and name not in _USES[probe]:
            users = [other for other, used in _USES.items() if name in used]
            what = f"'{value}'" if name == "text" else f"--{name}"
            raise InputError(f"{what} has no meaning for {probe}; it belongs to {', '.join(users)}")
    for name, allowed in (("matrix", MATRICES), ("map", MAPS)):
        if given[name] is not None and given[name] not in allowed:
            raise InputError(
                f"unknown {name} '{given[name]}'; allowed: {', '.join(allowed)}{did_you_mean(given[name], allowed)}"
            )
    if probe == "singular" and given["distance"] is not None and given["matrix"] != "qk":
        raise InputError("--distance has a meaning for --matrix qk alone: values do not depend on positions")
    several = [name for name in ("layer", "head", "word") if probe == "geometry" and "," in (given[name] or "")]
    if several:
        raise InputError(f"geometry draws one update: one --{several[0]}, not '{given[several[0]]}'")
    if probe == "journey" and given["text"] is None:
        raise InputError('journey needs a text, such as normscope words MODEL journey "To kill two birds with one stone"')


@dataclass
class _Request:
    """What a probe is asked for, resolved for the model."""

    view: "Model"
    probe: str
    given: dict[str, Any]
    seed: int

    def __post_init__(self) -> None:
        self.settings: dict[str, Any] = {}
        if "layer" in _USES[self.probe]:
            default = "-1" if self.probe == "singular" else "0"
            self.settings["layer"] = _places(self.given.get("layer", default), self.view.layers, "--layer")
        if "head" in _USES[self.probe]:
            self.settings["head"] = _places(self.given.get("head", "all"), self.view.heads, "--head")
        defaults: dict[str, Any] = {
            "nearest": 5,
            "matrix": "vo",
            "vectors": 5,
            "distance": 0,
            "token": -2,
            "map": "sphere",
            "text": None,
        }
        for name, default in defaults.items():
            if name in _USES[self.probe]:
                self.settings[name] = self.given.get(name, default)

    @property
    def notes(self) -> "pd.DataFrame":
        """What a reader has to know of the model."""
        import pandas as pd

        from normscope.words import notes_on

        distance, matrix = self.settings.get("distance", 0), self.settings.get("matrix", "qk")
        return pd.DataFrame({"text": notes_on(self.view, self.probe, distance, matrix)}, dtype="string")

    @property
    def words(self) -> "list[Word]":
        """The words that were named, or the common ones."""
        from normscope.words import probe_words

        named = self.given.get("word")
        found = probe_words(self.view, None if named is None else [part.strip() for part in named.split(",")])
        self.settings["words"] = [word.name for word in found]
        return found

    def of_heads(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """The rows of the heads that were asked for, and of their sum."""
        return table[table["head"].isna() | table["head"].isin(self.settings["head"])].reset_index(drop=True)


def _places(text: str, count: int, what: str) -> list[int]:
    """Numbers written with commas, from 0 or from the end; or all."""
    if text.strip().lower() == "all":
        return list(range(count))
    try:
        wanted = [int(part.replace("−", "-")) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{what} is a number, several with commas such as 0,5,11, or all; not '{text}'") from None
    for number in wanted:
        if not -count <= number < count:
            raise InputError(f"{what} {number}: there are {count}, 0 to {count - 1}")
    return list(dict.fromkeys(number % count for number in wanted))


def _embeddings(request: _Request) -> "dict[str, pd.DataFrame]":
    from normscope.words import OutputNorm, embedding_distances, extreme_tokens

    view = request.view
    with console(stderr=True).status("looking at all embeddings"):
        norm = OutputNorm.of(view)
        distances = embedding_distances(view.embeddings[: view.vocabulary], norm.kind, norm.eps)
        return {"distances": distances, "extremes": extreme_tokens(view)}


def _heads(request: _Request) -> "dict[str, pd.DataFrame]":
    """Queries or values of every layer that was asked for; with scores where there are words enough for them."""
    import pandas as pd

    from normscope.words import FEWEST, head_table, nearest_table, probed, tokens_of, update_table, updates_of

    view, probe, words = request.view, request.probe, request.words
    scored = request.given.get("scores", len(words) >= FEWEST)
    if scored and len(words) < FEWEST:
        raise InputError(f"--scores needs at least {FEWEST} words, not {len(words)}; leave --word out for the common nouns")
    count, distance = request.settings["nearest"], request.settings.get("distance", 0)
    tables: dict[str, list[pd.DataFrame]] = {"nearest": [], "updates": [], "heads": []}
    for layer in request.settings["layer"]:
        with stages(f"layer {layer}") as stage:
            if scored:
                found, table = head_table(probe, view, layer, words, count, distance, request.seed, stage)
                tables["heads"].append(request.of_heads(table))
            else:
                found = probed(probe, view, layer, words, count, distance)
        for name, each in found.items():
            rows = nearest_table(probe, view, layer, words, each, summed=name == "sum")
            tables["nearest"].append(request.of_heads(rows))
        if probe == "values":
            updates = updates_of(view, layer, tokens_of(view, words))
            tables["updates"].append(request.of_heads(update_table(layer, words, updates)))
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items() if parts}


def _singular(request: _Request) -> "dict[str, pd.DataFrame]":
    import pandas as pd

    from normscope.words import singular_tables

    asked = request.settings
    parts = []
    with progress("singular vectors", total=len(asked["layer"])) as advance:
        for done, layer in enumerate(asked["layer"], 1):
            found = singular_tables(request.view, layer, asked["matrix"], asked["vectors"], asked["nearest"], asked["distance"])
            parts.append({name: request.of_heads(table) for name, table in found.items()})
            advance(done)
    return {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in parts[0]}


def _journey(request: _Request) -> "dict[str, pd.DataFrame]":
    from normscope.words import follow, places

    asked = request.settings
    with console(stderr=True).status("following the token"):
        found = follow(request.view, asked["text"], asked["token"])
    with console(stderr=True).status(f"drawing the map ({asked['map']})"):
        mapped = places(request.view, found, asked["map"], request.seed)
    asked |= {"word": found.word, "predicted": found.predicted, "following": found.following}
    return {"journey": found.table, "places": mapped}


def _geometry(request: _Request) -> "dict[str, pd.DataFrame]":
    from normscope.words import head_update, norm_curves, norm_points, strongest_head

    layer, word = request.settings["layer"][0], request.words[0]
    one = "head" in request.given
    head = request.settings["head"][0] if one else strongest_head(request.view, layer, word.token)
    request.settings |= {"layer": layer, "head": head, "words": [word.name], "word": word.name}
    update = head_update(request.view, layer, head, word.token)
    return {"norm_points": norm_points(request.seed), "norm_curves": norm_curves(), "head_update": update}


_PROBES: "dict[str, Callable[[_Request], dict[str, pd.DataFrame]]]" = {
    "embeddings": _embeddings,
    "queries": _heads,
    "values": _heads,
    "singular": _singular,
    "journey": _journey,
    "geometry": _geometry,
}
_FOUND = ("token", "text", "score")


def _records(probe: str, tables: "dict[str, pd.DataFrame]", request: _Request) -> list[dict[str, Any]]:
    """A record for every word, vector or state with its nearest tokens; then one for every score of a head."""
    from normscope.runs import plain_rows

    rows = {name: plain_rows(table) for name, table in tables.items() if name != "notes"}
    whose: dict[str, Any] = {"probe": probe, "layer": None, "head": None, "word": None, "nearest": []}
    if probe == "embeddings":
        return [whose | row for row in rows["distances"]] + _grouped(whose, rows["extremes"], ("token", "text", "value"))
    if probe == "singular":
        return _grouped(whose, rows["singular"], ("nearest_token", "nearest_text", "score"))
    if probe == "journey":
        whose["word"] = request.settings["word"]
        return _grouped(whose, rows["journey"], ("nearest_token", "nearest_text", "nearest_cosine"))
    if probe == "geometry":
        whose |= {name: request.settings[name] for name in ("layer", "head", "word")}
        return [{**whose, "picture": name, **row} for name, points in rows.items() for row in points]
    lengths = {(row["layer"], row["head"], row["word"]): row for row in rows.get("updates", ())}
    found = _grouped(whose, rows["nearest"], ("nearest_token", "nearest_text", "score"))
    found = [record | lengths.get((record["layer"], record["head"], record["word"]), {}) for record in found]
    return found + [whose | row for row in rows.get("heads", ())]


def _grouped(whose: dict[str, Any], rows: list[dict[str, Any]], names: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Rows that differ only in rank and token as one record with a list of tokens."""
    records: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        token = dict(zip(_FOUND, (row.pop(name) for name in names), strict=True))
        row.pop("rank", None)
        record = records.setdefault(tuple(row.values()), {**whose, **row, "nearest": []})
        record["nearest"].append(token)
    return list(records.values())


def _print(probe: str, tables: "dict[str, pd.DataFrame]", request: _Request) -> None:
    """The tables that people read, then what has no meaning for the model."""
    from normscope.runs import plain_rows

    rows = {name: plain_rows(table) for name, table in tables.items()}
    _PRINTED[probe](rows, request)
    for row in rows["notes"]:
        console().print(row["text"], soft_wrap=True)


def _print_embeddings(rows: dict[str, list[dict[str, Any]]], request: _Request) -> None:
    print_table(
        ("distance of Norm(W_E) to W_E", "ℓ2 (std)", "cosine (std)"),
        [
            [
                row["setting"],
                f"{row['l2_mean']:.3f} ({row['l2_std']:.3f})",
                f"{_small(row['cosine_mean'])} ({_small(row['cosine_std'])})",
            ]
            for row in rows["distances"]
        ],
    )
    ends: dict[str, dict[str, list[str]]] = {}
    for row in rows["extremes"]:
        ends.setdefault(row["score"], {}).setdefault(row["end"], []).append(_shown(row["text"]))
    print_table(
        ("score", "top", "bottom"), [[score, "  ".join(end["top"]), "  ".join(end["bottom"])] for score, end in ends.items()]
    )


def _print_heads(rows: dict[str, list[dict[str, Any]]], request: _Request) -> None:
    """The nearest tokens of a few words, then the heads by their scores."""
    names = request.settings["words"]
    shown = names if "word" in request.given else names[:_SHOWN_WORDS]
    lengths = {(row["layer"], row["head"], row["word"]): row for row in rows.get("updates", ())}
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows["nearest"]:
        if row["word"] in shown:
            lines.setdefault((row["layer"], row["head"], row["word"]), []).append(_shown(row["nearest_text"]))
    columns = ["layer", "head", "word", "nearest"]
    body = [
        [str(layer), "all" if head is None else str(head), word, "  ".join(texts)]
        for (layer, head, word), texts in lines.items()
    ]
    if lengths:
        columns.insert(3, "update / word")
        for line, key in zip(body, lines, strict=True):
            line.insert(3, f"{lengths[key]['norm']:.3g} ({lengths[key]['relative_norm']:.2f}×)")
    print_table(columns, body)
    if "word" not in request.given:
        say(f"{len(shown)} of {len(names)} words shown; all are in the run folder (--word, --json)")
    if "heads" in rows:
        _print_scores(rows["heads"])


def _print_scores(heads: list[dict[str, Any]]) -> None:
    """Heads from the most meaning-preserving on; each score with its interval and that of random weights."""

    def score(row: dict[str, Any], name: str) -> str:
        if row[name] is None:
            return "–"
        limits = f"{row[f'{name}_low']:.2f}–{row[f'{name}_high']:.2f}"
        chance = "–" if row[f"{name}_random"] is None else f"{row[f'{name}_random']:.2f} (≤ {row[f'{name}_random_high']:.2f})"
        return f"{row[name]:.2f} ({limits}), random {chance}"

    ordered = sorted(heads, key=lambda row: (-row["same"], -(row["nearness"] or 0.0)))
    print_table(
        ("layer", "head", "same word", "nearness", "precedence", "kind"),
        [
            [
                str(row["layer"]),
                str(row["head"]),
                *(score(row, name) for name in ("same", "nearness", "precedence")),
                row["label"],
            ]
            for row in ordered
        ],
    )


def _print_singular(rows: dict[str, list[dict[str, Any]]], request: _Request) -> None:
    lines: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for row in rows["singular"]:
        key = (row["layer"], row["head"], row["index"], row["value"])
        lines.setdefault(key, {}).setdefault(row["side"], []).append(_shown(row["nearest_text"]))
    print_table(
        (
            "layer",
            "head",
            "number",
            "σ",
            "left (reads)",
            "right (writes)" if request.settings["matrix"] == "vo" else "right (keys)",
        ),
        [
            [str(layer), str(head), str(index), f"{value:.3g}", "  ".join(sides["left"]), "  ".join(sides["right"])]
            for (layer, head, index, value), sides in lines.items()
        ],
    )


def _print_journey(rows: dict[str, list[dict[str, Any]]], request: _Request) -> None:
    def number(row: dict[str, Any], name: str, form: str) -> str:
        return "–" if row.get(name) is None else format(row[name], form)

    following = _shown(request.settings["following"])
    of_output = (f"rank of {following}", f"P({following})", "would say") if following else ("–", "–", "–")
    print_table(
        ("layer", "nearest", "cosine", "angle", "travelled", "to start", "to predicted", "radius", *of_output),
        [
            [
                str(row["layer"]),
                _shown(row["nearest_text"]),
                *(
                    number(row, name, form)
                    for name, form in (
                        ("nearest_cosine", ".2f"), ("angle", ".1f"), ("travelled", ".0f"), ("cosine_start", ".2f"),
                        ("cosine_predicted", ".2f"), ("radius", ".3g"), ("rank", ",.0f"), ("probability", ".3f"),
                    )
                ),
                _shown(row.get("predicted_text") or "–"),
            ]
            for row in rows["journey"]
        ],
    )  # fmt: skip
    console().print(_summary(rows["journey"], request.settings), soft_wrap=True)


def _summary(rows: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """The journey in a sentence."""
    word, following, last = _shown(settings["word"]), _shown(settings["following"]), rows[-1]
    said = (
        f"{word} travels {last['travelled']:.0f}° in {last['layer']} layers and ends {last['from_start']:.0f}° from its start"
    )
    if last.get("rank") is None:
        return f"{said}."
    if last["rank"] != 1:
        return f"{said}; {following} ends as number {last['rank']:,} of what it would say ({last['probability']:.3f})."
    before = [row["layer"] for row in rows if row["rank"] != 1]
    reached = f"after layer {before[-1]} of 0 to {last['layer'] - 1}" if before else "from the first layer on"
    return f"{said}; {following} is what the model would say {reached}, at last with probability {last['probability']:.3f}."


def _print_geometry(rows: dict[str, list[dict[str, Any]]], request: _Request) -> None:
    asked = request.settings
    parts = {row["part"]: (row["x"], row["y"]) for row in rows["head_update"] if row["part"] != "circle"}
    print_table(
        (f"layer {asked['layer']}, head {asked['head']}, {asked['word']}", "along the word", "across"),
        [[part, f"{x:.4f}", f"{y:.4f}"] for part, (x, y) in parts.items()],
    )


_PRINTED = {
    "embeddings": _print_embeddings,
    "queries": _print_heads,
    "values": _print_heads,
    "singular": _print_singular,
    "journey": _print_journey,
    "geometry": _print_geometry,
}


def _small(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _shown(text: str) -> str:
    """A token's text with its blanks visible."""
    return repr(text)[1:-1].replace(" ", "␣")
