"""Formulas: what may be written, what they evaluate to, and that products keep value and text in step."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope import InputError
from normscope.schemes import Expression, Product, Scheme, Slots

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


def pythons_value(formula: str) -> float | None:
    """What Python itself makes of the formula; None where that is not a positive number of ordinary size."""
    try:
        value = eval(formula, {"sqrt": math.sqrt, "layer": VALUES["t"] + 1, **VALUES})
    except (ArithmeticError, ValueError, TypeError):  # the last from the square root of a complex number
        return None
    return value if isinstance(value, int | float) and 1e-9 < value < 1e9 else None


@given(formula=formulas)
def test_formula_product_and_text_say_what_python_says(formula: str) -> None:
    expected = pythons_value(formula)
    if expected is None:
        return
    expression = Expression.parse(formula)
    product = Product.of(expression)
    assert expression(VALUES) == pytest.approx(expected, rel=1e-9)
    assert product(VALUES) == pytest.approx(expected, rel=1e-9)
    reread = re.sub(r"√([\w.]+)", r"sqrt(\1)", product.text).replace("√", "sqrt")
    reread = reread.replace("·", "*").replace("^", "**").replace("−", "-").replace("α_t", "alpha").replace("T", "depth")
    assert pythons_value(reread) == pytest.approx(expected, rel=1e-9)


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
        "1j",
        "1if t else 2",
        "t\0",
        "-" * 201 + "1",
        "2**" * 60 + "layer",
    ],
)
def test_anything_but_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(InputError):
        Expression.parse(formula)


@pytest.mark.parametrize(
    "formula", ["9**9**9", "1/0", "0/0", "sqrt(0 - 1)", "exp(1000)", "10**400", "log(0-1)", "exp(sqrt(0-1))", "(0-8)**(1/3)"]
)
def test_formulas_without_a_value_are_refused_at_once(formula: str) -> None:
    with pytest.raises(InputError, match="not a finite number"):
        Scheme("a", Slots(step=formula))
    with pytest.raises(InputError):
        Scheme("a", Slots(input=f"norm**({formula})"))


def test_numbers_keep_their_digits_and_one_is_one() -> None:
    assert Expression.parse(0.123456789).text == "0.123456789"
    assert Expression.parse(1.0) == Expression.parse("1") == Expression.parse(1)
    assert Scheme("a", Slots(carry=1.0)) == Scheme("a", Slots())


def test_roots_of_squares_stay_absolute_values() -> None:
    assert Product.of("sqrt((t - 20)**2)")({"t": 5.0}) == 15.0


def test_unknown_name_suggests_the_right_one() -> None:
    with pytest.raises(InputError, match=r"unknown name 'alfa' in '1 - alfa'.*did you mean 'alpha'"):
        Expression.parse("1 - alfa")


@pytest.mark.parametrize("number", [10**5000, -(10**400), 1e301, math.nan, math.inf], ids=list("abcde"))
def test_a_number_without_a_finite_value_is_refused_before_its_digits_are_written(number: float) -> None:
    with pytest.raises(InputError, match="a number in a formula is finite"):
        Expression.parse(number)


@pytest.mark.parametrize(
    "formula", ["-" * 199 + "t", "2**" * 39 + "t", "sqrt(" * 33 + "t" + ")" * 33, "1-(" * 33 + "t" + ")" * 33]
)
def test_deep_formulas_print_and_compute(formula: str) -> None:
    expression = Expression.parse(formula)
    assert expression.text
    assert Product.of(expression).text
    assert Expression.parse(expression.source) == expression
