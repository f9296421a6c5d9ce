"""Addition and subtraction of several integers, written as text: ``[453+16+17-N846=1332]``.

Digits, ``+ - =``, ``N`` before a negative integer, begin ``[``, end ``]`` and the mask ``*``: 17 characters. Examples are made
on the device that trains on them, the same ones from the same seed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from normscope.errors import InputError

CHARACTERS = "0123456789+-=N[]*"
PLUS, MINUS, EQUALS, NEGATIVE, BEGIN, END, MASK = (CHARACTERS.index(c) for c in "+-=N[]*")
_MOST_DIGITS = 15
_MOST_INTEGERS = 1000


@dataclass(frozen=True)
class Examples:
    """Whole examples, ``[`` to ``]``, each in its own row and followed by masks.

    Attributes:
        characters: the text as numbers, shape (examples, longest).
        lengths: number of characters of each, ``[`` and ``]`` included.
        answers: where each answer begins; what is to be predicted is the answer and ``]``.
    """

    characters: Int[Tensor, "examples longest"]
    lengths: Int[Tensor, " examples"]
    answers: Int[Tensor, " examples"]

    def __getitem__(self, rows: "Tensor | slice") -> "Examples":
        """Some of the examples."""
        return Examples(self.characters[rows], self.lengths[rows], self.answers[rows])

    @classmethod
    def begun(cls, characters: Int[Tensor, "examples begun"]) -> "Examples":
        """Beginnings such as ``[1+2=`` or ``[1+2=3``, ended by ``]`` unless they are already, and followed by masks or not.

        All of one without ``=`` comes before its answer.

        Raises:
            InputError: if something else follows ``]`` or a mask.
        """
        characters = F.pad(characters, (0, 1), value=MASK)
        written = (characters != END) & (characters != MASK)
        lengths, places = written.sum(1, keepdim=True), torch.arange(characters.shape[1], device=characters.device)
        wrong = (written & (places >= lengths)).any(1)
        if bool(wrong.any()):
            text = as_text(characters[wrong][0, :-1])
            raise InputError(f"an example ends with {CHARACTERS[END]}, and {CHARACTERS[MASK]} alone follows it, not '{text}'")
        ended = torch.where(written, characters, torch.where(places == lengths, END, MASK))
        equals = ended == EQUALS
        answers = torch.where(equals.any(1), equals.int().argmax(1) + 1, lengths[:, 0])
        return cls(ended, lengths[:, 0] + 1, answers)

    @property
    def inputs(self) -> Int[Tensor, "examples places"]:
        """What a model reads: everything but ``]``, then masks."""
        return torch.where(self.read, self.characters[:, :-1], MASK)

    @property
    def targets(self) -> Int[Tensor, "examples places"]:
        """What it predicts at each place: the next character of the answer, or the mask."""
        return torch.where(self.predicted, self.characters[:, 1:], MASK)

    @property
    def read(self) -> Bool[Tensor, "examples places"]:
        """Which places hold a character that is read."""
        return self._places < self.lengths[:, None] - 1

    @property
    def predicted(self) -> Bool[Tensor, "examples places"]:
        """Which places predict a character of the answer or the end."""
        return (self._places >= self.answers[:, None] - 1) & self.read

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.characters.shape[1] - 1, device=self.characters.device)


@dataclass(frozen=True)
class Addition:
    """The distribution of examples: how many integers, and how many digits each.

    Attributes:
        counts: the numbers of integers to choose from, uniformly.
        digits: the numbers of digits to choose from for each integer, uniformly; the integer is then uniform among all
            positive and negative ones of that length, and the operators between them are + or − with equal chance.
    """

    counts: tuple[int, ...]
    digits: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, values, most in (("integers", self.counts, _MOST_INTEGERS), ("digits", self.digits, _MOST_DIGITS)):
            if not values or not all(isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= most for v in values):
                raise InputError(f"numbers of {what} are a list of whole numbers from 1 to {most}, not {list(values)}")
            if len(set(values)) < len(values):
                raise InputError(f"numbers of {what} are drawn with equal chance, so each is named once, not {list(values)}")

    @property
    def longest(self) -> int:
        """The most characters that an example can have."""
        integers, digits = max(self.counts), max(self.digits)
        return 1 + integers * (digits + 2) + 1 + self._answer_digits + 1

    @property
    def longest_answer(self) -> int:
        """The most characters of an answer, its sign and ``]`` included."""
        return 1 + self._answer_digits + 1

    @property
    def _answer_digits(self) -> int:
        return len(str(max(self.counts) * (10 ** max(self.digits) - 1)))

    def draw(self, examples: int, generator: torch.Generator) -> Examples:
        """Examples on the generator's device; the same ones whenever its state is the same."""
        device, most = generator.device, max(self.counts)

        def uniform(below: int, *shape: int) -> Tensor:
            return torch.randint(below, shape, generator=generator, device=device)

        counts = torch.tensor(self.counts, device=device)[uniform(len(self.counts), examples)]
        digits = torch.tensor(self.digits, device=device)[uniform(len(self.digits), examples, most)]
        smallest = 10 ** (digits - 1)
        # 2⁶² is so many times the range that no bias shows
        sizes = smallest + uniform(1 << 62, examples, most) % (9 * smallest)
        negative = uniform(2, examples, most).bool()
        subtracted = uniform(2, examples, most).bool()
        used = torch.arange(most, device=device) < counts[:, None]
        subtracted[:, 0] = False
        terms = torch.where(negative ^ subtracted, -sizes, sizes)
        return self._write(sizes, negative, subtracted, used, self.answer(terms, used))

    def answer(self, terms: Int[Tensor, "examples most"], used: Bool[Tensor, "examples most"]) -> Int[Tensor, " examples"]:
        """The answer to each example: the sum of the terms that it uses."""
        return (terms * used).sum(1)

    def _write(self, sizes: Tensor, negative: Tensor, subtracted: Tensor, used: Tensor, answer: Tensor) -> Examples:
        """Lay out every character that could occur in fixed columns, then close the gaps between those that do."""
        rows, most = sizes.shape
        later = torch.arange(most, device=sizes.device) > 0
        digits, digits_there = _decimal(sizes, max(self.digits))
        operators = torch.where(subtracted, MINUS, PLUS)[..., None]
        terms = torch.cat((operators, torch.full_like(operators, NEGATIVE), digits), -1)
        terms_there = torch.cat(((used & later)[..., None], (used & negative)[..., None], digits_there & used[..., None]), -1)
        result, result_there = _decimal(answer.abs(), self._answer_digits)

        def column(character: int) -> Tensor:
            return torch.full((rows, 1), character, device=sizes.device)

        always = torch.ones(rows, 1, dtype=torch.bool, device=sizes.device)
        asked = (column(BEGIN), terms.flatten(1), column(EQUALS))
        asked_there = (always, terms_there.flatten(1), always)
        wide = torch.cat((*asked, column(NEGATIVE), result, column(END)), 1)
        there = torch.cat((*asked_there, answer[:, None] < 0, result_there, always), 1)
        places = torch.where(there, there.cumsum(1) - 1, wide.shape[1])
        characters = torch.full((rows, wide.shape[1] + 1), MASK, device=sizes.device).scatter_(1, places, wide)
        return Examples(characters[:, : self.longest], there.sum(1), torch.cat(asked_there, 1).sum(1))


def as_text(characters: Int[Tensor, " length"]) -> str:
    """Characters as a person reads them."""
    return "".join(CHARACTERS[i] for i in characters.tolist())


def encode(line: str) -> Int[Tensor, " length"]:
    """The numbers of a text's characters."""
    unknown = sorted(set(line) - set(CHARACTERS))
    if unknown:
        raise InputError(f"'{line}' has characters that addition does not know: {' '.join(unknown)}; allowed: {CHARACTERS}")
    return torch.tensor([CHARACTERS.index(c) for c in line], dtype=torch.long)


def _decimal(numbers: Int[Tensor, "*shape"], width: int) -> tuple[Int[Tensor, "*shape width"], Bool[Tensor, "*shape width"]]:
    """Digits of each number, right-aligned, and which of them are written (no leading zeros, but 0 itself is)."""
    powers = 10 ** torch.arange(width - 1, -1, -1, device=numbers.device)
    quotients = numbers[..., None] // powers
    written = quotients > 0
    written[..., -1] = True
    return quotients % 10, written
