"""Arithmetic that a scheme's slots are written in: parsed from text, evaluated, multiplied and shown.

An ``Expression`` is a formula such as ``1/sqrt(layer)`` or ``1 - alpha``. A ``Product`` is Π atom^power, the form in
which speed factors are derived: the same object gives the number and the text.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from normscope.errors import InputError, did_you_mean

VARIABLES = {
    "t": "time, 0 at the first layer",
    "layer": "number of the layer, t + 1",
    "depth": "number of layers in all",
    "alpha": "the step that training learns and a simulation may schedule",
}


def _power(base: Any, exponent: Any) -> Any:
    """base^exponent; of numbers a real one, or an ArithmeticError or ValueError as all of ``math`` raises."""
    plain = isinstance(base, int | float) and isinstance(exponent, int | float)
    return math.pow(base, exponent) if plain else base**exponent


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sqrt": lambda value: _power(value, 0.5),
    "exp": lambda value: value.exp() if hasattr(value, "exp") else math.exp(value),
    "log": lambda value: value.log() if hasattr(value, "log") else math.log(value),
    "sin": lambda value: value.sin() if hasattr(value, "sin") else math.sin(value),
    "cos": lambda value: value.cos() if hasattr(value, "cos") else math.cos(value),
}
_OPERATORS: dict[type[ast.AST], tuple[str, int, Callable[..., Any]]] = {
    ast.Add: ("+", 1, operator.add),
    ast.Sub: ("−", 1, operator.sub),
    ast.Mult: ("·", 2, operator.mul),
    ast.Div: ("/", 2, operator.truediv),
    ast.Pow: ("^", 4, _power),
    ast.USub: ("−", 3, operator.neg),
}
_ATOM = 5
_LONGEST = 200
_LARGEST = 1e300
_SYMBOLS = {"alpha": "α_t", "depth": "T", "r": "r_j", "A": "|A_j|", "M": "|M_j|", "m": "m_j", "inner": "⟨θ_j,A_j⟩"}


@dataclass(frozen=True, repr=False)
class Expression:
    """A formula in ``t``, ``layer``, ``depth`` and ``alpha``, stored as Python source (``layer`` written t + 1).

    It prints as a reader would write it: ``1/√(t+1)``.
    """

    source: str

    @classmethod
    def parse(cls, text: "str | float | Expression", extra: frozenset[str] = frozenset()) -> "Expression":
        """Read a formula; ``extra`` names are allowed besides the variables. Nothing is ever executed."""
        if isinstance(text, Expression):
            return text
        if isinstance(text, bool) or not isinstance(text, (str, int, float)):
            raise InputError(f"a formula is a number or a text, not {text!r}")
        if not isinstance(text, str) and not abs(text) < _LARGEST:  # before its digits are written
            shown = text if isinstance(text, float) else "a longer integer"
            raise InputError(f"a number in a formula is finite and below {_LARGEST:g} in size, not {shown}")
        source = str(text).strip()
        check_length(source)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Python thinks of 1if, which is refused below
                tree = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two from deep nesting
            raise InputError(f"cannot read the formula '{text}'") from error
        _check(tree, source, extra)
        if isinstance(tree, ast.Constant):
            return cls(_number_text(float(tree.value)))  # type: ignore[arg-type]  # so that 1.0 is 1
        stored = ast.unparse(_LayerAsTime().visit(tree))
        check_length(stored)  # files hold this text, and it is read again
        return cls(stored)

    @property
    def tree(self) -> ast.expr:
        """The syntax tree of the source."""
        return _parse(self.source)

    @property
    def names(self) -> frozenset[str]:
        """The variables that occur."""
        called = {node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        return frozenset(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node not in called)

    @property
    def text(self) -> str:
        """The formula as a reader would write it: ``1/√(t+1)``."""
        return _render(self.tree)[0]

    def __repr__(self) -> str:
        return self.text

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The number (or tensor, where a value is one) for the given variables."""
        return _evaluated(self, values)

    @property
    def function(self) -> Callable[[Mapping[str, Any]], Any]:
        """The formula as a plain function of its variables, which a compiler can look through."""
        return _function_of(self.source)

    def less_one(self) -> "Expression":
        """The formula minus 1, simplified where that is plain: 0.5 gives -0.5, and 1 − α gives −α."""
        value = _constant(self.tree)
        if value is not None:
            return Expression(_number_text(value - 1))
        match self.tree:
            case ast.BinOp(left=ast.Constant(value=1), op=ast.Sub(), right=taken):
                return Expression(f"-({ast.unparse(taken)})" if _render(taken)[1] < _ATOM else f"-{ast.unparse(taken)}")
        return Expression(f"{self.source} - 1")


ONE = Expression("1")


def _evaluated(formula: "Expression | Product", values: Mapping[str, Any]) -> Any:
    try:
        return formula.function(values)
    except KeyError as missing:
        raise InputError(f"the formula {formula} needs a value of {missing}") from missing


def finite_value(formula: Callable[[Mapping[str, Any]], Any], values: Mapping[str, Any]) -> float | None:
    """The value of a formula of numbers; None where that is not a finite real number."""
    try:
        value = formula(values)
    except (ArithmeticError, ValueError):
        return None
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True, repr=False)
class Product:
    """Π atom^power over distinct atoms; an atom is the source of an expression, and no atom means 1.

    It prints as a reader would write it: ``r_j·|A_j|/α_t``.
    """

    factors: tuple[tuple[str, Fraction], ...] = ()

    @classmethod
    def of(cls, expression: Expression | str) -> "Product":
        """Take a formula apart at its products, quotients, roots and powers."""
        return _factorise(_parse(expression if isinstance(expression, str) else expression.source))

    def __mul__(self, other: "Product") -> "Product":
        powers = dict(self.factors)
        for atom, power in other.factors:
            powers[atom] = powers.get(atom, Fraction(0)) + power
        return Product(tuple((atom, power) for atom, power in powers.items() if power))

    def __truediv__(self, other: "Product") -> "Product":
        return self * other**-1

    def __repr__(self) -> str:
        return self.text

    def __pow__(self, power: int | Fraction) -> "Product":
        return Product(tuple((atom, p * power) for atom, p in self.factors) if power else ())

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The number (or tensor) for the given values of the names in the atoms."""
        return _evaluated(self, values)

    @property
    def names(self) -> frozenset[str]:
        """The variables that occur."""
        return frozenset(name for atom, _ in self.factors for name in Expression(atom).names)

    @property
    def function(self) -> Callable[[Mapping[str, Any]], Any]:
        """The product as a plain function of its variables, which a compiler can look through."""
        parts = [(Expression(atom).function, float(power)) for atom, power in self.factors]

        def product(values: Mapping[str, Any]) -> Any:
            result: Any = 1.0
            for part, power in parts:
                base = part(values)
                vanishes = isinstance(base, int | float) and base == 0 and power < 0
                result = result * (math.inf if vanishes else _power(base, power))
            return result

        return product

    @property
    def text(self) -> str:
        """The product as a reader would write it: ``r_j·|A_j|/α_t``."""
        above = [_power_text(atom, power) for atom, power in self.factors if power > 0]
        below = [_power_text(atom, -power) for atom, power in self.factors if power < 0]
        numerator = "·".join(above) or "1"
        if not below:
            return numerator
        return f"{numerator}/{below[0]}" if len(below) == 1 else f"{numerator}/({'·'.join(below)})"


@lru_cache(maxsize=1024)
def _parse(source: str) -> ast.expr:
    """The syntax tree of a checked source; trees are never changed once they are here."""
    return ast.parse(source, mode="eval").body


class _LayerAsTime(ast.NodeTransformer):
    """Write ``layer`` as ``t + 1``, so that time is the only depth variable."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse("t + 1", mode="eval").body if node.id == "layer" else node


def check_length(source: str) -> None:
    """Refuse a text that is longer than any formula needs to be, before it is parsed."""
    if len(source) > _LONGEST:
        raise InputError(f"a formula has at most {_LONGEST} characters; one that begins '{source[:20]}' has {len(source)}")


def _check(node: ast.AST, text: str, extra: frozenset[str]) -> None:
    """Allow numbers, the variables, + - * / ** and the listed functions of one argument; nothing else."""
    allowed = [*VARIABLES, *sorted(extra)]
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if not abs(number) < _LARGEST:
                raise InputError(f"the number in '{text}' is not finite, or not below {_LARGEST:g} in size")
        case ast.Name(id=name):
            if name not in allowed:
                raise InputError(
                    f"unknown name '{name}' in '{text}'; allowed: {', '.join(allowed)}{did_you_mean(name, allowed)}"
                )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            _check(left, text, extra)
            _check(right, text, extra)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text, extra)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            _check(argument, text, extra)
        case _:
            raise InputError(
                f"cannot use '{ast.unparse(node)}' in '{text}'; allowed: numbers, {', '.join(allowed)}, "
                f"+ - * / **, and {', '.join(FUNCTIONS)}"
            )


@lru_cache(maxsize=1024)
def _function_of(source: str) -> Callable[[Mapping[str, Any]], Any]:
    return _function(_parse(source))


def _function(node: ast.AST) -> Callable[[Mapping[str, Any]], Any]:
    match node:
        case ast.Constant(value=value):
            number = float(value)  # type: ignore[arg-type]  # a float, so that 9**9**9 overflows at once
            return lambda values: number
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.UnaryOp(operand=operand):
            negated = _function(operand)
            return lambda values: -negated(values)
        case ast.BinOp(left=left, op=op, right=right):
            combine, first, second = _OPERATORS[type(op)][2], _function(left), _function(right)
            return lambda values: combine(first(values), second(values))
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            apply, inner = FUNCTIONS[name], _function(argument)
            return lambda values: apply(inner(values))
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _render(node: ast.AST) -> tuple[str, int]:
    """Text of a node and how tightly it binds."""
    match node:
        case ast.Constant(value=value):
            return _number_text(float(value)), _ATOM  # type: ignore[arg-type]  # _check lets only numbers pass
        case ast.Name(id=name):
            return _SYMBOLS.get(name, name), _ATOM
        case ast.UnaryOp(operand=operand):
            sign, strength, _ = _OPERATORS[ast.USub]
            return sign + _bracketed(operand, strength), strength
        case ast.BinOp(left=left, op=op, right=right):
            sign, strength, _ = _OPERATORS[type(op)]
            # Subtraction, division and powers do not associate to the right (a − (b − c)), and powers not to the left.
            right_strength = strength if isinstance(op, ast.Add | ast.Mult) else strength + 1
            left_strength = strength + 1 if isinstance(op, ast.Pow) else strength
            return _bracketed(left, left_strength) + sign + _bracketed(right, right_strength), strength
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return "√" + _bracketed(argument, _ATOM), _ATOM - 1
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return f"{name}({_render(argument)[0]})", _ATOM
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _bracketed(node: ast.AST, strength: int) -> str:
    text, own = _render(node)
    return text if own >= strength else f"({text})"


def _factorise(node: ast.expr) -> Product:
    match node:
        case ast.Constant(value=value) if value == 1:
            return Product()
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _factorise(left) * _factorise(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _factorise(left) / _factorise(right)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent) if (power := _rational(exponent)) is not None:
            return _raise(base, power)
        case ast.Call(func=ast.Name(id="sqrt"), args=[base]):
            return _raise(base, Fraction(1, 2))
    return Product(((ast.unparse(node), Fraction(1)),))


def _raise(base: ast.expr, power: Fraction) -> Product:
    """A power of one factor multiplies its exponent; a power of several, such as √(2·T), stays together.

    So does a root of an even power: √(x²) is |x|, not x.
    """
    inner = _factorise(base)
    if len(inner.factors) == 1 and (inner.factors[0][1] % 2 != 0 or power.denominator == 1):
        return inner**power
    return Product(((ast.unparse(base), power),)) if power else Product()


def _rational(node: ast.expr) -> Fraction | None:
    """The exponent as a fraction if it is one with a small denominator: 2, 0.5, 1/4, -1/2."""
    value = _constant(node)
    if value is None:
        return None
    fraction = Fraction(value).limit_denominator(1000)
    return fraction if float(fraction) == value else None


def _constant(node: ast.expr) -> float | None:
    """The value of a formula without variables; None with variables or without a value."""
    if any(isinstance(part, ast.Name) and part.id not in FUNCTIONS for part in ast.walk(node)):
        return None
    return finite_value(Expression(ast.unparse(node)), {})


def _number_text(value: float) -> str:
    """A number with all its digits, and no more: 1, 0.05, 0.123456789."""
    return repr(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _power_text(atom: str, power: Fraction) -> str:
    text, strength = _render(_parse(atom))
    bracketed = text if strength >= _ATOM else f"({text})"
    if power == 1:
        return bracketed
    if power == Fraction(1, 2):
        return f"√{bracketed}"
    return f"{bracketed}^{power}" if power.denominator == 1 else f"{bracketed}^({power})"
