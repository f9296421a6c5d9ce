"""A block as a drawing, from its slots: first the parts in order, then the same parts as text.

The figure in a report is drawn from the same parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from normscope.schemes.expressions import ONE, Product
from normscope.schemes.scheme import Scheme, Slots
from normscope.schemes.score_slot import PLAIN

_FUNCTIONS = {"feedforward": "Feed-forward", "cross": "Cross-attention"}
_TRUNK = 3
_BRANCH = 20  # column where the branch's boxes begin; the residual's factor has to fit before it


@dataclass(frozen=True)
class SublayerDrawing:
    """The parts of one sublayer from its entry to its exit.

    Attributes:
        branch: what the branch passes: norms, the function, factors.
        carry: the factor on the residual, or an empty text.
        after: what stands on the trunk after the sum: a norm, or an empty text.
    """

    branch: tuple[str, ...]
    carry: str
    after: str


def sublayer_parts(slots: Slots, function: str, norm: str = "Norm") -> SublayerDrawing:
    """The parts of a sublayer, in the order in which a token passes them; what is inside f stands before its last matrix."""
    branch = []
    step, carry = slots.formulas
    if slots.reads_norm:
        branch.append(norm)
        if slots.input_factor != Product():
            branch.append(f"× {slots.input_factor.text}")
    if slots.heads != "none":
        branch.append(f"Norm({', '.join(slots.heads)})")
    if slots.scores != PLAIN:
        branch.append(slots.texts["scores"])
    branch.append(function)
    inside = [text for text, there in ((norm, slots.inner == "norm"), ("× σ(W_G·)", slots.gate == "sigmoid")) if there]
    if inside:
        branch += [*inside, "W_out" if function == _FUNCTIONS["feedforward"] else "W_O"]
    if slots.output != "none":
        branch.append({"norm": norm, "tangent": "part ⟂ x"}[slots.output])
    if step != ONE:
        branch.append(f"× {step.text}")
    return SublayerDrawing(tuple(branch), "" if carry == ONE else f"× {carry.text}", norm if slots.stream == "norm" else "")


def block_records(scheme: Scheme, sublayers: Sequence[str] = ("attention", "feedforward")) -> list[dict[str, Any]]:
    """The drawing as a tidy table: a record for each sublayer of each stage, to be kept in results and drawn later.

    ``sublayers`` names those of the block. All but ``feedforward`` have the slots of attention.
    """
    records = []
    for stage in scheme.stages:
        holds = f"t < {stage.end_text}" if stage.then else ("after" if stage is not scheme else "")
        for sublayer in sublayers:
            slots = stage.feedforward if sublayer == "feedforward" else stage.attention
            part = sublayer_parts(slots, _FUNCTIONS.get(sublayer, sublayer.capitalize()), stage.norm_text)
            records.append({"scheme": scheme.name, "stage": holds, "sublayer": sublayer, **asdict(part)})
    return records


def draw_blocks(scheme: Scheme) -> str:
    """The block of every stage in box-drawing characters, x entering at the top."""
    if scheme.then is None:
        return draw_records(block_records(scheme))
    titles = (f"for t < {stage.end_text}:" if stage.then else "then:" for stage in scheme.stages)
    drawings = (draw_records(block_records(stage)) for stage in scheme.stages)
    return "\n\n".join(f"{title}\n{drawing}" for title, drawing in zip(titles, drawings, strict=True))


def draw_records(records: Sequence[Mapping[str, Any]]) -> str:
    """The block of the first stage in ``block_records``, likewise."""
    first = [record for record in records if record["stage"] == records[0]["stage"]]
    parts = [SublayerDrawing(tuple(record["branch"]), record["carry"], record["after"]) for record in first]
    width = max(len(text) for part in parts for text in part.branch) + 4
    lines = [_trunk("x")]
    for part in parts:
        lines += _draw_sublayer(part, width)
    return "\n".join([*lines, _trunk("▼")])


def _draw_sublayer(part: SublayerDrawing, width: int) -> list[str]:
    bridge = "─" * (_BRANCH + width // 2 - _TRUNK - 1)
    boxes = [_edge("┌┴┐", width)]
    for text in part.branch:
        boxes += ["│" + text.center(width - 2) + "│", "├" + "─" * (width - 2) + "┤"]
    boxes[-1] = _edge("└┬┘", width)
    lines = [_trunk("├" + bridge + "┐"), *(_trunk("│").ljust(_BRANCH) + box for box in boxes)]
    if part.carry:
        lines.append(_trunk(part.carry).ljust(_BRANCH + width // 2) + "│")
    lines.append(_trunk("⊕" + bridge + "┘"))
    if part.after:
        inner = len(part.after) + 4
        lines += [_trunk("│"), _edge("┌┴┐", inner, _TRUNK), f"│ {part.after} │", _edge("└┬┘", inner, _TRUNK)]
    return [*lines, _trunk("│")]


def _edge(corners: str, width: int, joint: int | None = None) -> str:
    """The top or bottom of a box, with its joint in the middle or at a given column."""
    joint = width // 2 if joint is None else joint
    return corners[0] + "─" * (joint - 1) + corners[1] + "─" * (width - joint - 2) + corners[2]


def _trunk(text: str) -> str:
    return " " * _TRUNK + text
