"""Tests run under type checks: of each test the first calls of every function, and a sample of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from normscope.core.norms import centre
from runtime_types import EVERY, FIRST, begin_test, check_samples, checker


def test_the_first_calls_of_a_test_are_checked_and_a_sample_of_the_others() -> None:
    def double(x: Float[Tensor, "rows 2"]) -> Float[Tensor, "rows 2"]:
        return 2 * x

    sampled = check_samples(double, typechecker=checker)

    def is_checked() -> bool:
        try:
            sampled(torch.ones(2, 3))
        except TypeCheckError:
            return True
        return False

    checked = [call for call in range(1, 3 * EVERY) if is_checked()]
    assert checked == [*range(1, FIRST + 1), EVERY, 2 * EVERY]
    begin_test()
    assert is_checked()
    assert torch.equal(sampled(torch.ones(3, 2)), 2 * torch.ones(3, 2))


def test_closures_of_one_function_are_counted_together() -> None:
    def closure() -> Callable[[Any], Any]:
        def double(x: Float[Tensor, "rows 2"]) -> Float[Tensor, "rows 2"]:
            return 2 * x

        sampled: Callable[[Any], Any] = check_samples(double, typechecker=checker)
        return sampled

    for _ in range(FIRST):
        with pytest.raises(TypeCheckError):
            closure()(torch.ones(2, 3))
    assert closure()(torch.ones(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("again", range(2))
def test_functions_of_the_package_are_checked_in_every_test(again: int) -> None:
    for _ in range(FIRST):
        with pytest.raises(TypeCheckError):
            centre([1.0])
