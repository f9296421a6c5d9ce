"""Run folders of models as data for the model atlas: what was measured then, without the model."""

from collections.abc import Mapping
from typing import Any

from normscope.explorer.atlas_tables import curves, grid_of, head_grids, journey_data
from normscope.results.tables import Tables, plain_rows, table_of, token_name

_MAPS = "An audit keeps the attention maps of the few heads that noise would damage most; open the model to see every head's."
_WORDS = "An audit does not probe heads with words; open the model, or run normscope words."
_TOKEN = "An audit follows one token of its sentence; open the model to follow any token of a prompt."


def audit_data(tables: Tables, about: Mapping[str, Any]) -> dict[str, Any]:
    """The same as ``ModelSession.read`` returns, with the maps and the journey that the tables hold."""
    layers = int(about["layers"])
    tokens = table_of(tables, "tokens")
    skipped = table_of(tables, "skipped")
    texts = [] if tokens is None else [str(text) for text in tokens["text"]]
    reasons = {} if skipped is None else {row["measure"]: row["reason"] for row in plain_rows(skipped) if row["layer"] is None}
    return {
        "kind": "audit",
        "about": {name: about.get(name) for name in ABOUT},
        "prompt": {"text": None, "tokens": texts, "note": f"{about.get('tokens', 0):,} {about.get('reads', 'tokens')} read"},
        "heads": head_grids(tables, layers),
        "curves": curves(tables),
        "maps": _maps(tables, len(texts)),
        "token": _token(tables, about),
        "missing": {"map": _MAPS, "words": _WORDS, "token": _TOKEN, **_unmeasured(reasons)},
    }


ABOUT = ("model", "description", "scheme", "schemes", "layers", "heads", "kv_heads", "dim", "head_dim", "vocabulary")


def _unmeasured(reasons: Mapping[str, str]) -> dict[str, str]:
    """Why there are no heads, where no measure of attention could be taken."""
    return {"heads": reasons["sparsity"]} if "sparsity" in reasons else {}


def _maps(tables: Tables, size: int) -> list[dict[str, Any]]:
    """The attention maps that were kept, with layer and head."""
    maps = table_of(tables, "maps")
    if maps is None:
        return []
    cells: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in plain_rows(maps):
        cells.setdefault((int(row["layer"]), int(row["head"])), []).append(row)
    return [{"layer": layer, "head": head, "pattern": grid_of(rows, size)} for (layer, head), rows in sorted(cells.items())]


def _token(tables: Tables, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The journey of the token that was followed; None without one."""
    table, places = table_of(tables, "journey"), table_of(tables, "places")
    if table is None:
        return None
    words = [] if places is None else list(places[places["kind"] == "word"]["text"])
    word = token_name(words[0]) if words else ""
    return {"text": word, "sentence": about.get("sentence"), **journey_data(table, places)}
