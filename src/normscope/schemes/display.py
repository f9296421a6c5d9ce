"""A scheme for people: as text in a terminal, as HTML in a notebook."""

from html import escape

from normscope.schemes.law import NoFormula
from normscope.schemes.records import scheme_record
from normscope.schemes.scheme import Scheme
from normscope.schemes.score_slot import PLAIN

_LAYER_NORM = "A_j is taken at Norm(X), and is its centred part where the output or the stream is normalised"
_POINTWISE = "gain ⊙ {0}(a·x + s) + bias with learned a and s (tanh has no s), in theory {0}(√d·x/2)/√d for x of norm 1"
_INSIDE = {"m_j": "m_j is the share of attention that the sink takes", "M_j": "M_j is what the head mixes, before W_O"}
_LEARNS = {"vector": "learned for each component", "scalar": "learned as one number"}
_SYMBOLS = "x_j = r_j θ_j is the hidden state of token j, A_j what attention computes for it; layer t from 0, T layers"
_GREY = "rgba(128,128,128,.35)"  # visible on light and on dark backgrounds; all other colours are the notebook's own
_CELL = f"text-align:left;padding:.15em .9em .15em 0;border-bottom:1px solid {_GREY};vertical-align:top"


def scheme_text(scheme: Scheme) -> str:
    """Slots, update, law and block, for a terminal."""
    columns, *rows = slot_rows(scheme)
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    table = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in (columns, *rows)]
    lines = [f"  {label:<{widths[0]}}  {text}" for label, text in fact_rows(scheme)]
    return "\n".join([_title(scheme), "", *table, "", *lines, "", scheme.block])


def scheme_html(scheme: Scheme) -> str:
    """The same as HTML that needs nothing else and takes its colours from the page."""
    columns, *rows = slot_rows(scheme)
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in columns)
    slots = "".join(f"<tr>{''.join(_cell(text) for text in row)}</tr>" for row in rows)
    facts = "".join(f"<tr>{_cell(label)}{_cell(text)}</tr>" for label, text in fact_rows(scheme))
    table = '<table style="border-collapse:collapse;margin:.6em 0;background:none;color:inherit">'
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:2em;color:inherit;background:none">'
        f"<div><strong>{escape(_title(scheme))}</strong>{table}<thead><tr>{head}</tr></thead><tbody>{slots}</tbody></table>"
        f"{table}<tbody>{facts}</tbody></table></div>"
        f'<pre style="line-height:1.15;margin:0;background:none;color:inherit">{escape(scheme.block)}</pre></div>'
    )


def dash(text: str) -> str:
    """The text of a slot in a table: a dash where it is empty."""
    return "–" if text in ("none", PLAIN) else text


def slot_rows(scheme: Scheme) -> list[list[str]]:
    """The table of slots: names of columns, then a row for each sublayer of each stage; an empty slot is a dash."""
    rows = [["", *scheme.attention.texts]]
    for stage in scheme.stages:
        when = f" (t < {stage.end_text})" if stage.then else " (then)" if stage is not scheme else ""
        for name, slots in (("attention", stage.attention), ("feed-forward", stage.feedforward)):
            rows.append([name + when, *(dash(text) for text in slots.texts.values())])
    return rows


def fact_rows(scheme: Scheme) -> list[tuple[str, str]]:
    """What follows from the slots, and what is known of the scheme: label and text."""
    record = scheme_record(scheme)
    feedforward = record["feedforward"]["update"]
    learned = " and ".join(dict.fromkeys(_LEARNS[stage.learned] for stage in scheme.stages if stage.learns_alpha))
    facts = [
        ("attention", record["update"]),
        ("feed-forward", feedforward),
        ("flow", record["flow"]),
        ("directions", "" if record["speed"] == NoFormula.text else "θ̇_j = (1/s_j) P_θj A_j"),
        ("damping", f"s_j = {record['speed']}"),
        ("radius", f"ṙ_j = {record['radial']}   (over a block: {record['radius']})"),
        ("A_j", record["attention"]),
        ("where", "; ".join([_SYMBOLS, *(text for symbol, text in _INSIDE.items() if symbol in record["speed"])])),
        ("theory", record["statement"]),
        ("alpha", f"α_t = {record['alpha']}, {learned}" if "α_t" in record["update"] + feedforward else ""),
        ("initial", "" if record["initial"] == "1" else f"W_V, W_O, W_in and W_out times {record['initial']}"),
        ("LayerNorm", _LAYER_NORM if any(stage.norm == "layer" for stage in scheme.stages) else ""),
        *((norm, _POINTWISE.format(norm)) for norm in dict.fromkeys(stage.norm for stage in scheme.stages if stage.pointwise)),
        ("note", record["note"]),
        ("used by", record["users"]),
        *(("paper", paper) for paper in record["papers"]),
    ]
    return [(label, text) for label, text in facts if text]


def _title(scheme: Scheme) -> str:
    record = scheme_record(scheme)
    return f"{scheme.name}: {scheme.title or 'a scheme of your own'}, {record['norm']}"


def _cell(text: str) -> str:
    return f'<td style="{_CELL}">{escape(text)}</td>'
