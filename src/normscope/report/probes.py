"""Sections on what heads do to tokens: scores of all heads, nearest tokens, sizes of updates."""

import pandas as pd

from normscope.results import Chart, Figure, Line, PageTable, Section
from normscope.results.tables import (
    Tables,
    a_few,
    cell,
    figures_section,
    floats,
    head_map,
    joined_tokens,
    spans_decades,
    table_of,
    token_name,
)

_WORDS = 3  # that tables of nearest tokens show
_HEADS = 20  # rows of a table of heads
_BESIDE = 0.25  # of the way to the next head
_SCORES = {
    "same": (
        "Heads that return the token itself",
        "share of tokens",
        "Bright heads return the token itself as the nearest one.",
    ),
    "nearness": (
        "Heads that return related tokens",
        "nearness",
        "Bright heads return tokens of similar meaning; 0.5 is chance.",
    ),
    "precedence": (
        "Heads that return neighbours in text",
        "precedence",
        "Bright heads return tokens that occur beside the token in text; 0.5 is chance.",
    ),
}
_LIMITS = (-0.03, 1.03)  # of scores, so that small differences look small
_HYPHEN = "‑"  # at which no line breaks
_LABELS = ("meaning-preserving", "precedence", "none")


def heads_section(tables: Tables, settings: str) -> Section | None:
    """Scores of all heads beside those of random weights, as maps or by head, and a table of the best."""
    table = table_of(tables, "heads")
    if table is None:
        return None
    charts: dict[str, Figure | None] = {}
    shown = [_label_table(table)]
    for probe, rows in table.groupby("probe", sort=False):
        for score in _SCORES:
            if rows[score].notna().any():
                charts |= _score_charts(str(probe), score, rows, settings)
        shown.append(_head_table(str(probe), rows))
    text = (
        "Over all tokens: how often the nearest token is the token itself or a case variant (same), how much nearer in "
        "meaning the returned tokens are than those returned for other tokens (nearness), and how much likelier beside the "
        "token in text (precedence); the token itself counts in neither. 0.5 is chance for the last two. Random weights have "
        "the same singular values and other singular vectors.",
    )
    return figures_section("What heads do to tokens", text, charts, shown, name="heads")


def _score_charts(probe: str, score: str, rows: pd.DataFrame, settings: str) -> dict[str, Figure | None]:
    """Maps of the heads and of random weights in their place; with one layer, both in one chart."""
    title, label, seen = _SCORES[score]
    name = f"heads-{probe}-{score}"
    if rows["layer"].nunique() == 1:
        return {name: _score_chart(probe, score, rows, settings)}
    above = f"{seen} Only what random weights, in the next figure, do not reach is learnt."
    beside = "The same for random weights with the same singular values: what a head has to surpass."
    random, limits = f"{score}_random", (0.0, 1.0)
    maps: dict[str, Figure | None] = {
        name: head_map(rows, score, f"{title} ({probe})", label, above, settings, limits=limits, chosen=True)
    }
    if rows[random].notna().any():
        words = (f"{title} ({probe}, random weights)", label, beside, settings)
        maps[f"{name}-random"] = head_map(rows, random, *words, limits=limits, chosen=True)
    return maps


def _score_chart(probe: str, score: str, rows: pd.DataFrame, settings: str) -> Chart:
    """Dots with intervals for the heads of one layer, and beside them random weights."""
    title, label, _ = _SCORES[score]
    rows = rows.sort_values("head")
    heads = floats(rows["head"])
    value, low, high, random = (floats(rows[f"{score}{end}"]) for end in ("", "_low", "_high", "_random"))
    lines = [Line("head", heads, value, low, high, dots=True)]
    names = (f"{score}_random_low", f"{score}_random_high")
    random_low, random_high = (floats(rows[name]) if name in rows else random for name in names)
    lines.append(Line("random weights", [head + _BESIDE for head in heads], random, random_low, random_high, dots=True))
    if score != "same":
        lines.append(Line("chance", [heads[0], heads[-1] + _BESIDE], [0.5, 0.5]))
    caption = "A head has learnt this if its bar, the confidence interval, lies clearly above the bar of random weights."
    layer = int(rows["layer"].iloc[0])
    return Chart(f"{title} ({probe}, layer {layer})", "head", label, tuple(lines), caption, settings, limits=_LIMITS)


def _label_table(table: pd.DataFrame) -> PageTable:
    counts = table.groupby(["probe", "label"], sort=False).size().to_dict()
    labels = [*_LABELS, *sorted({str(label) for label in table["label"].dropna()} - set(_LABELS))]
    probes = dict.fromkeys(map(str, table["probe"]))
    rows = tuple((probe, *(str(counts.get((probe, label), 0)) for label in labels)) for probe in probes)
    return PageTable("How many heads are of which kind", ("probe", *labels), rows)


def _head_table(probe: str, rows: pd.DataFrame) -> PageTable:
    """The heads, sorted by kind and then by score."""
    kinds = {label: place for place, label in enumerate(_LABELS)}
    order = rows.assign(kind=[kinds.get(str(label), len(kinds)) for label in rows["label"]])
    order = order.sort_values(["kind", "same", "nearness"], ascending=[True, False, False], kind="stable").head(_HEADS)
    scores = [score for score in _SCORES if rows[score].notna().any()]
    cells = [[f"{layer}, {head}" for layer, head in zip(order["layer"], order["head"], strict=True)]]
    cells.append([str(label).replace("-", _HYPHEN) for label in order["label"]])
    for score in scores:
        cells += [_with_interval(order, score), [cell(value, ".2f") for value in floats(order[f"{score}_random"])]]
    columns = ("layer, head", "kind", *(name for score in scores for name in (score, "random")))
    cut = f"the first {len(order)} of {len(rows)}, all are in heads.parquet" if len(order) < len(rows) else "all"
    words = " to ".join(dict.fromkeys(str(int(count)) for count in (rows["words"].min(), rows["words"].max())))
    caption = f"Heads by their {probe}, sorted ({cut}), over {words} tokens; in brackets the confidence interval"
    return PageTable(caption, columns, tuple(zip(*cells, strict=True)))


def _with_interval(table: pd.DataFrame, score: str) -> list[str]:
    values = zip(*(floats(table[f"{score}{end}"]) for end in ("", "_low", "_high")), strict=True)
    return [f"{value:.2f} ({cell(low, '.2f')}–{cell(high, '.2f')})" if value == value else "–" for value, low, high in values]


def nearest_sections(tables: Tables, settings: str) -> list[Section]:
    """For each probe the tokens that heads return for the first tokens; for values also how large their updates are."""
    table, updates = table_of(tables, "nearest"), table_of(tables, "updates")
    texts = {
        "queries": "The token is the query: these are the tokens whose keys it attends to most, head by head.",
        "values": "The token is attended to: a head's update is added to it, and these are the tokens nearest to the sum.",
    }
    titles = {"queries": "Queries and their keys", "values": "Keys and their values"}
    probes = list(dict.fromkeys(map(str, table["probe"]))) if table is not None else []
    if updates is not None and "values" not in probes:
        probes.append("values")
    sections = []
    for probe in probes:
        shown = _nearest_tables(table[table["probe"] == probe]) if table is not None else []
        charts = {"updates": _update_chart(updates, settings)} if probe == "values" and updates is not None else {}
        text = (texts.get(probe, ""),) if probe in texts else ()
        sections.append(figures_section(titles.get(probe, probe), text, charts, shown))
    return sections


def _nearest_tables(rows: pd.DataFrame) -> list[PageTable]:
    """A table for each of a few layers: heads down, words across."""
    words = list(dict.fromkeys(rows["word"]))[:_WORDS]
    tables = []
    for layer in a_few(sorted({int(layer) for layer in rows["layer"]})):
        here = rows[rows["layer"] == layer].sort_values("rank", kind="stable")
        heads = sorted({int(head) for head in here["head"].dropna()})
        groups = {f"head {head}": here[here["head"] == head] for head in heads}
        groups["all heads"] = here[here["head"].isna()]
        cells = tuple(
            (name, *(joined_tokens(group[group["word"] == word]["nearest_text"]) for word in words))
            for name, group in groups.items()
            if len(group)
        )
        tables.append(PageTable(f"Nearest tokens in layer {layer}, nearest first", ("head", *map(token_name, words)), cells))
    return tables


def _update_chart(table: pd.DataFrame, settings: str) -> Figure | None:
    """Size of updates by layer and head; with one layer, the spread over tokens as well."""
    heads, whole = table[table["head"].notna()], table[table["head"].isna()]["relative_norm"]
    sizes = heads.groupby(["layer", "head"])["relative_norm"].agg(["mean", "min", "max"]).reset_index()
    title, label = "Size of updates", "|update| / |token|"
    if sizes["layer"].nunique() > 1:
        caption, log = "Bright heads change a token most; means over tokens.", spans_decades(floats(sizes["mean"]))
        return head_map(sizes, "mean", title, label, caption, settings, log=log, chosen=True)
    if sizes.empty:
        return None
    places = floats(sizes["head"])
    mean, low, high = (floats(sizes[name]) for name in ("mean", "min", "max"))
    lines = [Line("one head", places, mean, low, high, dots=True)]
    if whole.notna().any():
        lines.append(Line("sum of all heads", [places[0], places[-1]], [float(whole.mean())] * 2))
    return Chart(
        f"{title} in layer {int(sizes['layer'].iloc[0])}",
        "head",
        label,
        tuple(lines),
        "Dots are means over tokens, bars reach from the least to the most; below 1 the token outweighs what is added to it.",
        settings,
        log_y=spans_decades([value for line in lines for value in line.y]),
    )
