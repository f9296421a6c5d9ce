"""The slot ``scores``: parts such as ``softcap(50)+sink``, read as text and turned into what ``core.scores`` computes."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from normscope.errors import InputError
from normscope.schemes.expressions import Expression, check_length, finite_value

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.core.scores import Scores

PLAIN = "softmax"
SCORE_PARTS = ("temperature", "softcap", "sink")  # in the order in which they act
_KEYS = "n"  # the number of keys that a query sees
_TRIED = (*map(float, range(1, 65)), *(2.0**power for power in range(7, 21)))  # values of n at which a formula is tested
_ALLOWED = "slot 'scores' is 'softmax', or some of temperature(log(n)), softcap(50) and sink, each once, joined by +"


@dataclass(frozen=True)
class Temperature:
    """A factor on the logits of a query that sees n keys: a formula of n."""

    formula: Expression
    function: "Callable[[Mapping[str, Any]], Any]" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", self.formula.function)  # which a compiler can look through

    def __call__(self, seen: "Tensor") -> "Tensor":
        """The factors, for the numbers of keys that queries see."""
        factors: Tensor = seen.new_ones(seen.shape) * self.function({_KEYS: seen})
        return factors


@lru_cache(maxsize=256)
def score_parts(text: str) -> dict[str, Expression]:
    """The parts of the slot and the formula of each, in the order in which they act; none for the plain softmax."""
    if not isinstance(text, str):
        raise InputError(f"{_ALLOWED}, not {text!r}")
    if text == PLAIN:
        return {}
    check_length(text.strip())
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{_ALLOWED}, not '{text}'") from error
    given = [_part(node, text) for node in _summands(tree)]
    parts = dict(given)
    if len(parts) < len(given):
        raise InputError(f"{_ALLOWED}, not '{text}'")
    for name, formula in parts.items():
        for keys in _TRIED if _KEYS in formula.names else (2.0,):
            value = finite_value(formula, {_KEYS: keys})
            if value is None or (name != "sink" and not (value > 0 or (value == 0 and keys == 1))):
                what = "a finite number" if name == "sink" else "positive"
                at = f" for n = {keys:.0f}" if _KEYS in formula.names else ""
                raise InputError(f"in slot 'scores' the number of {name} must be {what}{at}, not '{formula.text}'")
    return {name: parts[name] for name in SCORE_PARTS if name in parts}


def score_text(text: str) -> str:
    """The slot as it is stored: parts in the order in which they act, formulas as Python source."""
    stored = "+".join(_shown(name, formula.source) for name, formula in score_parts(text).items()) or PLAIN
    check_length(stored)  # files hold this text, and it is read again
    return stored


def score_title(text: str) -> str:
    """The slot as a reader would write it."""
    return " + ".join(_shown(name, formula.text) for name, formula in score_parts(text).items()) or PLAIN


def score_rule(text: str) -> "Scores":
    """What ``core.scores`` computes with."""
    from normscope.core.scores import Scores

    parts = score_parts(text)
    cap, sink = (None if (formula := parts.get(name)) is None else float(formula({})) for name in ("softcap", "sink"))
    return Scores(cap, sink, Temperature(parts["temperature"]) if "temperature" in parts else None)


def _shown(name: str, number: str) -> str:
    return name if (name, number) == ("sink", "0") else f"{name}({number})"


def _summands(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _summands(left)
            yield right
        case _:
            yield node


def _part(node: ast.expr, text: str) -> tuple[str, Expression]:
    match node:
        case ast.Name(id="sink"):
            return "sink", Expression("0")
        case ast.Call(func=ast.Name(id="temperature" as name), args=[argument], keywords=[]):
            allowed = {_KEYS}
        case ast.Call(func=ast.Name(id="softcap" | "sink" as name), args=[argument], keywords=[]):
            allowed = set[str]()
        case _:
            raise InputError(f"{_ALLOWED}, not '{text}'")
    formula = Expression.parse(ast.unparse(argument), extra=frozenset({_KEYS}))
    if formula.names - allowed:
        knows = "a formula of n, the number of keys that a query sees" if allowed else "a number"
        raise InputError(f"in slot 'scores' {name} takes {knows}, not '{ast.unparse(argument)}'")
    return name, formula
