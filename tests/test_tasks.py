"""Addition: sums that Python agrees with, the stated distribution, and the published example."""

import itertools
import re
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from normscope import InputError
from normscope.training.tasks import CHARACTERS, MASK, Addition, AdditionTask, Examples, as_text, encode, stream_seed

PUBLISHED = Addition((3, 4, 6), (2, 3))
SENTENCE = re.compile(r"\[(N?\d+(?:[+-]N?\d+)*)=(N?\d+)\](\**)")
TERM = re.compile(r"([+-]?)(N?)(\d+)")
SURE = 1e-3  # a fair sample fails one test in a thousand, and the seed is fixed


def draw(task: Addition, examples: int, seed: int = 1) -> Examples:
    return task.draw(examples, torch.Generator().manual_seed(seed))


def lines(examples: Examples) -> list[str]:
    """Every row as text, all at once."""
    width = examples.characters.shape[1]
    text = np.frombuffer(CHARACTERS.encode(), dtype=np.uint8)[examples.characters.numpy()].tobytes().decode()
    return [text[i : i + width] for i in range(0, len(text), width)]


@cache
def published_terms() -> list[list[tuple[str, str, str]]]:
    """(operator, sign, digits) of every integer of 10⁵ examples, their answers checked."""
    return checked_terms(PUBLISHED, 100_000)


def checked_terms(task: Addition, count: int) -> list[list[tuple[str, str, str]]]:
    """The integers of each example, after doing its sum."""
    examples, terms = draw(task, count), []
    lengths, answers = examples.lengths.tolist(), examples.answers.tolist()
    for line, length, begins in zip(lines(examples), lengths, answers, strict=True):
        found = SENTENCE.fullmatch(line)
        assert found, line
        asked, answer, _ = found.groups()
        terms.append(TERM.findall(asked))
        total = sum(int(digits) * (-1) ** ((operator == "-") + (sign == "N")) for operator, sign, digits in terms[-1])
        assert answer == str(total).replace("-", "N"), line
        assert length == found.start(3)
        assert begins == found.start(2)
    return terms


def is_uniform(values: list[str], allowed: str | list[str]) -> bool:
    """Whether every allowed value occurs, no other does, and each equally often."""
    kinds, counts = np.unique(values, return_counts=True)
    return sorted(kinds) == sorted(allowed) and chisquare(counts).pvalue > SURE


def by_hand(*texts: str) -> Examples:
    rows = [encode(text) for text in texts]
    characters = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=MASK)
    lengths = torch.tensor([len(text) for text in texts])
    return Examples(characters, lengths, torch.tensor([text.index("=") + 1 for text in texts]))


def test_100_000_answers_are_what_python_computes() -> None:
    assert len(published_terms()) == 100_000


@pytest.mark.parametrize(
    ("task", "count"),
    [
        (Addition((1, 2), (1,)), 2000),
        (Addition((2, 5), (1, 15)), 2000),
        (Addition((1000,), (15,)), 5),
        (Addition((7,), (9, 10)), 500),
    ],
)
def test_answers_of_very_short_and_very_long_sums(task: Addition, count: int) -> None:
    assert len(checked_terms(task, count)) == count


def test_every_count_and_length_occurs_and_no_other() -> None:
    terms = published_terms()
    integers = [digits for row in terms for _, _, digits in row]
    assert {len(row) for row in terms} == {3, 4, 6}
    assert {len(digits) for digits in integers} == {2, 3}
    assert not any(digits.startswith("0") for digits in integers)
    assert {int(digits) for digits in integers} == set(range(10, 1000))
    assert all(row[0][0] == "" and all(operator for operator, _, _ in row[1:]) for row in terms)


def test_counts_lengths_signs_operators_and_digits_are_uniform() -> None:
    rows = published_terms()
    terms = [term for row in rows for term in row]
    assert is_uniform([str(len(row)) for row in rows], ["3", "4", "6"])
    assert is_uniform([str(len(digits)) for _, _, digits in terms], ["2", "3"])
    assert is_uniform([sign for _, sign, _ in terms], ["", "N"])
    assert is_uniform([operator for row in rows for operator, _, _ in row[1:]], "+-")
    assert is_uniform([digits[0] for _, _, digits in terms], "123456789")
    assert is_uniform([digits[-1] for _, _, digits in terms], "0123456789")
    assert is_uniform([digits for _, _, digits in terms if len(digits) == 3], [str(n) for n in range(100, 1000)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda row: len(row), lambda row: row[0][1]),
        (lambda row: row[1][0], lambda row: row[1][1]),
        (lambda row: row[0][1], lambda row: row[1][1]),
        (lambda row: len(row[0][2]), lambda row: len(row[1][2])),
        (lambda row: row[1][0], lambda row: row[2][0]),
        (lambda row: row[0][2][0], lambda row: row[1][2][0]),
    ],
    ids=["count-sign", "operator-sign", "two-signs", "two-lengths", "two-operators", "two-digits"],
)
def test_choices_do_not_depend_on_one_another(one, other) -> None:
    rows = published_terms()
    table = np.unique([f"{one(row)} {other(row)}" for row in rows], return_counts=True)
    kinds = [sorted({key.split(" ")[i] for key in table[0]}) for i in (0, 1)]
    counts = dict(zip(*table, strict=True))
    assert chi2_contingency([[counts.get(f"{a} {b}", 0) for b in kinds[1]] for a in kinds[0]]).pvalue > SURE


def test_the_published_example_has_the_published_target() -> None:
    examples = by_hand("[453+16+17-N846=1332]")
    assert as_text(examples.inputs[0]) == "[453+16+17-N846=1332"
    assert as_text(examples.targets[0]) == "***************1332]"


def test_shorter_rows_are_followed_by_masks_that_nobody_predicts() -> None:
    examples = by_hand("[453+16+17-N846=1332]", "[7-7=0]", "[N3-9=N12]")
    assert [as_text(row) for row in examples.inputs] == ["[453+16+17-N846=1332", "[7-7=0" + 14 * "*", "[N3-9=N12" + 11 * "*"]
    assert [as_text(row) for row in examples.targets] == [
        "***************1332]",
        "****0]" + 14 * "*",
        "*****N12]" + 11 * "*",
    ]
    assert examples.read.sum(1).tolist() == [20, 6, 9]
    assert examples.predicted.sum(1).tolist() == [5, 2, 4]
    assert as_text(examples[1:].targets[1]) == as_text(examples.targets[2])
    assert torch.equal(examples[torch.tensor([2, 0])].lengths, examples.lengths[[2, 0]])


def test_masks_and_targets_of_drawn_examples() -> None:
    examples = draw(PUBLISHED, 500)
    for line, read, target in zip(lines(examples), examples.inputs, examples.targets, strict=True):
        asked, equals, answer = line.rstrip("*").partition("=")
        assert as_text(read).rstrip("*") == asked + equals + answer[:-1]
        assert as_text(target).rstrip("*") == "*" * len(asked) + answer
        assert len(read) == len(target) == PUBLISHED.longest - 1


def test_zero_and_negative_answers_are_written_without_a_needless_sign() -> None:
    texts = {line.rstrip("*").rpartition("=")[2] for line in lines(draw(Addition((2,), (1,)), 5000))}
    assert texts == {f"{n}]".replace("-", "N") for n in range(-18, 19)}  # 0] and no N0]


@pytest.mark.parametrize("task", [Addition((1,), (1,)), Addition((1, 2), (1,)), Addition((2,), (1, 2)), Addition((3,), (1,))])
def test_longest_is_reached_and_never_passed(task: Addition) -> None:
    """Every example that a tiny distribution can give, written by Python."""
    integers = [sign * n for length in task.digits for n in range(10 ** (length - 1), 10**length) for sign in (1, -1)]
    whole, answers = 0, 0
    for count in task.counts:
        for chosen in itertools.product(integers, repeat=count):
            asked = sum(len(str(n)) for n in chosen) + count - 1
            totals = {chosen[0] + sum(chosen[1:]), chosen[0] - sum(chosen[1:])}  # all + or all −: the extremes are among them
            answer = max(len(str(total)) for total in totals)
            whole, answers = max(whole, asked + answer + 3), max(answers, answer + 1)
    assert (task.longest, task.longest_answer) == (whole, answers)
    drawn = draw(task, 20_000)
    assert drawn.characters.shape[1] == task.longest
    assert drawn.lengths.max() <= task.longest
    assert (drawn.lengths - drawn.answers).max() <= task.longest_answer


def test_a_seed_gives_the_same_examples_and_another_gives_others() -> None:
    first, again, other = (draw(PUBLISHED, 200, seed) for seed in (5, 5, 6))
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("characters", "lengths", "answers"))
    assert len(set(lines(first)) & set(lines(other))) < 5


@pytest.mark.parametrize(
    ("counts", "digits", "message"),
    [
        ((0,), (1,), "numbers of integers .* from 1 to 1000, not \\[0\\]"),
        ((), (1,), "numbers of integers"),
        ((True,), (1,), "numbers of integers"),
        ((1001,), (1,), "numbers of integers"),
        ((2, -1), (1,), "numbers of integers"),
        ((2,), (0,), "numbers of digits .* from 1 to 15, not \\[0\\]"),
        ((2,), (), "numbers of digits"),
        ((2,), (1, True), "numbers of digits"),
        ((2,), (16,), "numbers of digits"),
    ],
)
def test_impossible_distributions_are_refused(counts: tuple[int, ...], digits: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Addition(counts, digits)


def test_a_task_has_three_distributions_that_share_their_digits() -> None:
    splits = AdditionTask.of((3, 4, 6), (5,), (7, 8, 9), (2, 3)).splits
    assert {name: (split.counts, split.digits) for name, split in splits.items()} == {
        "in-distribution": ((3, 4, 6), (2, 3)),
        "ood-interpolation": ((5,), (2, 3)),
        "ood-extrapolation": ((7, 8, 9), (2, 3)),
    }


def test_streams_are_told_apart_by_seed_name_and_index() -> None:
    asked = list(itertools.product((0, 1, 100), ("training", "weights", "calibration"), range(50)))
    seeds = [stream_seed(*one) for one in asked]
    assert len(set(seeds)) == len(asked)
    assert seeds == [stream_seed(*one) for one in asked]
    assert all(0 <= seed < 2**63 for seed in seeds)  # what a torch generator takes
    assert stream_seed(1, "training") == stream_seed(1, "training", 0)


def test_text_to_numbers_and_back() -> None:
    assert as_text(encode(CHARACTERS)) == CHARACTERS
    assert encode(CHARACTERS).tolist() == list(range(17))
    with pytest.raises(InputError, match=r"'1\*x\+y' has characters that addition does not know: x y; allowed: 0123"):
        encode("1*x+y")


def test_an_empty_text_has_no_numbers() -> None:
    assert encode("").dtype == torch.int64
    assert as_text(encode("")) == ""
