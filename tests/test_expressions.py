"""Formulas: what may be written, what they evaluate to, and that products keep value and text in step."""

import math
import re

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from normscope import InputError
from normscope.schemes import Expression, Product

VALUES = {"t": 2.5, "depth": 12.0, "alpha": 0.3}
leaves = st.sampled_from(["t", "depth", "alpha", "layer", "2", "0.5", "3"])
formulas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        inner.map(lambda f: f"sqrt({f})"),
        st.tuples(inner, st.sampled_from(["2", "0.5", "(1/4)", "(-1)"])).map(lambda p: f"({p[0]})**{p[1]}"),
    ),
    max_leaves=8,
)


def sympy_value(formula: str) -> complex:
    names = {name: sympy.Float(value) for name, value in VALUES.items()} | {"layer": sympy.Float(VALUES["t"] + 1)}
    return complex(sympy.sympify(formula, locals=names))


@given(formula=formulas)
def test_formula_product_and_text_agree_with_sympy(formula: str) -> None:
    try:
        expected = sympy_value(formula)
    except (TypeError, ValueError):
        return
    if not math.isfinite(expected.real) or abs(expected.imag) > 0 or expected.real <= 1e-9:
        return
    expression = Expression.parse(formula)
    product = Product.of(expression)
    reread = re.sub(r"√([\w.]+)", r"sqrt(\1)", product.text).replace("√", "sqrt")
    reread = reread.replace("·", "*").replace("^", "**").replace("−", "-").replace("α_t", "alpha").replace("T", "depth")
    try:
        value = product(VALUES)
    except ZeroDivisionError:
        return
    if isinstance(value, complex):
        return
    assert expression(VALUES) == pytest.approx(expected.real, rel=1e-9)
    assert value == pytest.approx(expected.real, rel=1e-9)
    assert sympy_value(reread).real == pytest.approx(expected.real, rel=1e-5)


@pytest.mark.parametrize(
    ("formula", "text", "inverse"),
    [
        ("1/sqrt(layer)", "1/√(t+1)", "√(t+1)"),
        ("(2*depth)**(1/4)", "(2·T)^(1/4)", "1/(2·T)^(1/4)"),
        ("1 - alpha", "1−α_t", "1/(1−α_t)"),
        ("2*alpha/depth", "2·α_t/T", "T/(2·α_t)"),
    ],
)
def test_formulas_read_as_in_a_paper(formula: str, text: str, inverse: str) -> None:
    assert Expression.parse(formula).text == text
    assert (Product.of(Expression.parse(formula)) ** -1).text == inverse


def test_squares_cancel_roots() -> None:
    assert (Product.of("1/sqrt(t + 1)") ** 2).text == "1/(t+1)"


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')",
        "t.real",
        "alpha if t else 1",
        "lambda: 1",
        "[1]",
        "t @ t",
        "open(t)",
        "sqrt(t, t)",
        "x",
        "1 +",
        "",
        "1e999",
        "True",
    ],
)
def test_anything_but_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(InputError):
        Expression.parse(formula)


def test_unknown_name_suggests_the_right_one() -> None:
    with pytest.raises(InputError, match=r"unknown name 'alfa' in '1 - alfa'.*did you mean 'alpha'"):
        Expression.parse("1 - alfa")
