"""Formulas and schemes drawn from a seed, right and wrong, and what the library answers to them, as JSON."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

from normscope import InputError
from normscope.schemes import (
    NAMED,
    NORM_TITLES,
    At,
    Expression,
    Product,
    Scheme,
    Slots,
    block_records,
    find_scheme,
    scheme_from,
    scheme_record,
    scheme_values,
)
from normscope.schemes.display import fact_rows
from normscope.schemes.expressions import finite_value
from normscope.schemes.law import Law
from normscope.schemes.score_slot import Temperature

PLACES = [(0.0, 1.0), (3.0, 12.0), (2.5, 7.25), (40.0, 40.0), (99.0, 100.0)]
MEASURES = {"r": 1.7, "A": 0.6, "M": 0.8, "m": 0.3}
INNER = -0.4
_NUMBERS = ["0", "1", "2", "3", "0.5", "1.0", "2.5", "1e-3", "1e5", ".25", "4.", "0.1", "1/3", "1e16", "12345678901234567890"]
_HOSTILE = [
    "", " ", "2t", "t t", "t^2", "t²", "√t", "α", "1/0", "0**-1", "(0-1)**0.5", "log(0)", "log(t-t)", "exp(1000)",
    "1e400", "1e300",
    "9**9**9", "1/(t-t)", "t if t else 2", "1if t else 2", "not t", "t<2<3", "t and t or 1 and t", "t or not t", "a.b",
    "1 .real", "f(t)(t)",
    "sqrt(t, 2)", "sqrt()", "sqrt(t=2)", "f(1, a=t)", "f(a=1, 2)", "t[1]", "t[1, 2]", "[t, 1]", "()", "(t,)", "t, 2",
    "1,", "'a' \"b\"", "True", "None",
    "1j", "1.5J", "...", "0x1F", "0b11", "0o17", "01", "00", "1_000", "1__0", "1_", "1e", "1.e5", "t // 2", "t % 2",
    "t @ t", "t << 1 | 2 & 3 ^ 1",
    "+t", "~t", "-(-t)", "- t", "--t", "2**-t", "-t**2", "(-t)**2", "t # note", "(t\n+1)", "t\n+1", "t\\\n+1", "t\x00",
    "t\t+ 1", "layr", "dept",
    "alpa", "sqr(t)", "t is not t", "t not in t", "1 in t", "t;", "t=1", "t==1", "$", "t!", "“t”",
    "(" * 60 + "t" + ")" * 60, "(" * 120 + "t",
    "-" * 150 + "t", "t" + "+t" * 90, "t" + "+t" * 120, "layer" + "*layer" * 33, "x" * 201, "\u202et", "t\u00a0+1",
    "1/(1/0)", "inf", "nan", "1e308*10", "1/(1e308*10)",
    "t**1e200", "(t**1e200)**1e200", "t**0.001**0.001", "2**0.5**0.5", "t**(1/7)", "t**0.123456789", "sqrt(t**2)",
    "sqrt(sqrt(t))", "sqrt(t*depth)", "(t**2)**0.5",
    "sqrt(depth)*sqrt(depth)", "t/t", "2/2", "-0", "0-0", "1-1", "1 - alpha", "1 - alpha*t", "1.0 - t", "1 - (t - 2)",
    "2 - alpha", "(((1)))", "1**0", "t**0",
]  # fmt: skip
_WRONG_VALUES: list[Any] = [
    None, True, 3, [], {}, "nrom", "norn", "", "none ", "qkq", "vk", "sinc", "sink+sink", "softcap(0)", "softcap(n)",
    "softcap(1+2j)", "temperature(t)", "temperature(-n)", "temperature(500-n)", "temperature(1-0.4*n)",
    "sink(log(0))", "softcap(" + "-" * 1500 + "1)",
    "sink" + "+sink" * 1000, "temperature(n" + "*n" * 80 + ")", "norm+1", "norm**2", "1/norm", "norm*0", "norm*(0-1)",
    "norm/norm", "softmax ", "tangnt",
]  # fmt: skip
_WRONG_FORMULAS: list[Any] = ["alpha", "x", True, "1/t", 0, 2, "-1", "depth", "t", [], "log(0)"]
_WRONG_KEYS = ["nam", "thn", "attn", "papers", "title", "name", "then", "feedforward"]
_LETTERS = "t1.+-*/^()<=,[]% n"


def formulas(seed: int, count: int) -> list[str | float]:
    """Formulas that are right, broken at random places, and written to be refused."""
    draw = random.Random(seed)
    made: list[str | float] = [0, 1, 0.05, -0.5, 1e300, -1e16, 123456789.25]
    made += _HOSTILE
    for _ in range(count):
        text = _formula(draw, ["t", "layer", "depth", "alpha"])
        made += [text, _broken(draw, text)]
    return made


def schemes(seed: int, count: int) -> list[Any]:
    """Dictionaries: every named scheme, some with further parts, random slots, and the same with mistakes."""
    draw = random.Random(seed)
    made: list[Any] = [scheme_values(scheme) for scheme in NAMED.values()]
    for name, part in product(["pre", "mix", "hybrid-star"], ["qk", "qkv", "gate", "inner", "sink(-1)", "temperature(log(n))"]):
        made.append(scheme_values(find_scheme(f"{name}+{part}")))
    made += [scheme_values(NAMED[draw.choice(list(NAMED))].with_norm(norm)) for norm in NORM_TITLES for _ in range(3)]
    for _ in range(count):
        scheme = _scheme(draw)
        made += [scheme, _mistaken(draw, scheme)]
    return [*made, None, 3, [], {}, {"name": "a"}, {"name": "a", "attention": []}, {"attention": {}}, _deep(16), _deep(17)]


def formula_answer(text: Any) -> dict[str, Any]:
    """What a formula is in the library, or its refusal."""

    def answer() -> dict[str, Any]:
        formula = Expression.parse(text)
        factors = Product.of(formula)
        values = [{"t": t, "depth": depth, "alpha": 0.3} for t, depth in PLACES]
        return {
            "source": formula.source,
            "text": formula.text,
            "names": sorted(formula.names),
            "product": factors.text,
            "inverse": (Product.of("r") / factors).text,
            "lessOne": formula.less_one().text,
            "values": [finite_value(formula, at) for at in values],
            "products": [finite_value(factors, at) for at in values],
        }

    return _attempt(answer)


def scheme_answer(dictionary: Any) -> dict[str, Any]:
    """Texts and numbers of a scheme, or its refusal."""

    def answer() -> dict[str, Any]:
        scheme = scheme_from(dictionary)
        return {
            "values": scheme_values(scheme),
            "texts": scheme_record(scheme),
            "facts": [list(row) for row in fact_rows(scheme)],
            "blocks": [{**record, "branch": list(record["branch"])} for record in block_records(scheme)],
            "places": [_attempt(lambda t=t, depth=depth: _numbers(scheme, t, depth)) for t, depth in PLACES],
            "checks": [_attempt(lambda depth=depth: scheme.check(depth) or {}) for depth in (1.0, 6.0, 7.25)],
        }

    return _attempt(answer)


def _numbers(scheme: Scheme, t: float, depth: float) -> dict[str, Any]:
    stage = scheme.at(t, depth)
    place = stage.place(t, depth)
    return {
        "stage": stage.name,
        "alpha": place.alpha,
        "sphere": stage.on_sphere(),
        "initial": _attempt(lambda: {"is": stage.initial_factor(t, depth)}),
        "attention": _sublayer(stage.attention, stage.law_of(stage.attention), place),
        "feedforward": _sublayer(stage.feedforward, stage.law_of(stage.feedforward), place),
    }


def _sublayer(slots: Slots, law: Law, place: At) -> dict[str, Any]:
    values = {**place.values, **MEASURES}
    rule, temperature = slots.score_rule, slots.score_rule.temperature
    return {
        **{slot: _attempt(lambda slot=slot: {"is": slots.number(slot, place)}) for slot in ("step", "carry", "input")},
        "speed": _attempt(lambda: {"is": _finite(law, lambda at: law.speed(at), values)}),
        "radial": _attempt(lambda: {"is": _finite(law, lambda at: law.radial(INNER, at), values)}),
        "scores": [rule.cap, rule.sink, temperature.formula({"n": 5.0}) if isinstance(temperature, Temperature) else None],
    }


def _finite(law: Law, formula: Callable[[Any], Any], values: dict[str, Any]) -> float | None:
    """A number or None; where theory has no law, its refusal."""
    return finite_value(formula, values) if law.known else formula(values)


def _attempt(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return answer()
    except InputError as error:
        return {"error": str(error)}


def _formula(draw: random.Random, names: list[str], depth: int = 3) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(names + _NUMBERS)
    inner = [_formula(draw, names, depth - 1) for _ in range(2)]
    kind = draw.random()
    if kind < 0.15:
        return f"{draw.choice(['sqrt', 'log'])}({inner[0]})"
    if kind < 0.25:  # of large arguments the last digit of these decides, and browsers round it differently
        return f"{draw.choice(['exp', 'sin', 'cos'])}({draw.choice([*names, '2', '0.5', '1000'])})"
    if kind < 0.35:
        return f"-{inner[0]}" if draw.random() < 0.5 else f"-({inner[0]})"
    if kind < 0.5:
        return f"({inner[0]})**{draw.choice(['2', '0.5', '(1/4)', '(-1/2)', '3', '-1', '1.5', '(1/3)', 't'])}"
    sign = draw.choice(["+", "-", "*", "/", " - ", " * "])
    return draw.choice(["{0}{2}{1}", "({0}){2}({1})", "({0}){2}{1}"]).format(*inner, sign)


def _broken(draw: random.Random, text: str) -> str:
    place = draw.randrange(len(text) + 1)
    return text[:place] + draw.choice(_LETTERS) + text[place + draw.randrange(3) :]


def _slots(draw: random.Random, feedforward: bool) -> dict[str, Any]:
    values = {
        "input": draw.choice(
            ["none", "norm", "norm/sqrt(layer)", f"norm*({_formula(draw, ['t', 'depth'], 1)})", "2*norm/alpha"]
        ),
        "inner": draw.choice(["none", "none", "norm"]),
        "output": draw.choice(["none", "norm", "tangent"]),
        "step": draw.choice(["1", 0.5, "alpha", "1/sqrt(layer)", _formula(draw, ["t", "layer", "depth", "alpha"], 2)]),
        "carry": draw.choice(["1", "1 - alpha", "(2*depth)**(1/4)", 0.9, _formula(draw, ["depth", "alpha", "t"], 2)]),
        "stream": draw.choice(["none", "norm"]),
    }
    if not feedforward:
        parts = [
            f"temperature({draw.choice(['log(n)', '1 + log(n)/2', 'sqrt(n)', '2'])})",
            f"softcap({draw.choice([50, 2.5])})",
        ]
        parts += [draw.choice(["sink", "sink(-1)", "sink(0)", "sink(1/2)"])]
        values["heads"] = draw.choice(["none", "q", "qk", "qkv", "v", "kv"])
        values["scores"] = "+".join(draw.sample(parts, draw.randrange(4))) or "softmax"
        values["gate"] = draw.choice(["none", "none", "sigmoid"])
    return {slot: value for slot, value in values.items() if draw.random() < 0.7}


def _scheme(draw: random.Random, stages: int = 3) -> dict[str, Any]:
    values: dict[str, Any] = {"name": draw.choice(["mine", "a+b", "δ"]), "attention": _slots(draw, False)}
    if draw.random() < 0.5:
        values["feedforward"] = _slots(draw, True)
    if draw.random() < 0.5:
        values["norm"] = draw.choice(list(NORM_TITLES))
    if draw.random() < 0.5:
        values["alpha"] = draw.choice([0.05, "1/layer", "2", _formula(draw, ["t", "depth"], 1)])
    if draw.random() < 0.2:
        values |= {
            "learned": "scalar",
            "initial": draw.choice(["sqrt(log(2*depth))", "(8*depth)**(-1/4)", _formula(draw, ["depth"], 1)]),
        }
    if stages and draw.random() < 0.4:
        values |= {"until": draw.choice([0.25, "1/depth", 0.5, "2/depth", "1/3"]), "then": _scheme(draw, stages - 1)}
    return values


def _mistaken(draw: random.Random, scheme: dict[str, Any]) -> dict[str, Any]:
    """The same scheme with one mistake, or one more thing that may be one."""
    wrong = {**scheme, "attention": dict(scheme["attention"])}
    slot = draw.choice(["input", "heads", "scores", "inner", "gate", "output", "step", "carry", "stream"])
    anything = draw.choice(_WRONG_VALUES)
    edits: list[Callable[[], Any]] = [
        lambda: wrong["attention"].update({slot: anything}),
        lambda: wrong["attention"].update({slot + draw.choice("xs"): "none"}),
        lambda: wrong["attention"].update(step=draw.choice(_HOSTILE), carry=_broken(draw, "(2*depth)**(1/4)")),
        lambda: wrong["attention"].update(scores=_broken(draw, "temperature(1 + log(n))+softcap(50)+sink(-1)")),
        lambda: wrong["attention"].update(input=_broken(draw, "norm/sqrt(layer)")),
        lambda: wrong.update({draw.choice(["norm", "learned", "weights"]): anything}),
        lambda: wrong.update({draw.choice(["alpha", "initial", "until"]): draw.choice(_WRONG_FORMULAS)}),
        lambda: wrong.update({draw.choice(_WRONG_KEYS): draw.choice([3, "a b", "", [1], {}, "pre"])}),
        lambda: wrong.update(
            feedforward={**_slots(draw, True), **draw.choice([{"heads": "qk"}, {"scores": "sink"}, {"gate": "x"}])}
        ),
    ]
    draw.choice(edits)()
    return wrong


def _deep(stages: int) -> dict[str, Any]:
    """A scheme of that many stages."""
    made: dict[str, Any] = {"name": "last", "attention": {}}
    for stage in range(stages - 1, 0, -1):
        made = {"name": f"stage{stage}", "attention": {"input": "norm"}, "until": stage / stages, "then": made}
    return made
