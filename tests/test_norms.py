"""Norms against torch's own layers, and the geometry that the papers give them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope import InputError
from normscope.core.norms import (
    centre,
    hyperplane_basis,
    layer_ellipsoid,
    layer_norm,
    rms_ellipsoid,
    rms_norm,
    tangent,
    unit,
)

ROUNDING = 1e-13


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(dim=st.integers(2, 40), eps=st.sampled_from([0.0, 1e-6, 1e-2]), seed=st.integers(0, 1000))
def test_functions_equal_torchs_layers(dim: int, eps: float, seed: int) -> None:
    x, gain, bias = random(5, 3, dim, seed=seed), random(dim, seed=seed + 1), random(dim, seed=seed + 2)
    expected = torch.nn.functional.layer_norm(x, (dim,), gain, bias, eps)
    assert torch.allclose(layer_norm(x, gain, bias, eps), expected, rtol=ROUNDING, atol=1e-12)
    assert torch.allclose(rms_norm(x, gain, None, eps), torch.nn.functional.rms_norm(x, (dim,), gain, eps), rtol=ROUNDING)
    assert torch.allclose(rms_norm(x, gain, bias, eps) - bias, rms_norm(x, gain, None, eps), atol=1e-12)


def test_modules_gradient_equals_ours() -> None:
    ours = random(4, 7).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    gain, bias, direction = random(7, seed=1), random(7, seed=2), random(4, 7, seed=3)
    (layer_norm(ours, gain, bias, 1e-5) * direction).sum().backward()
    (torch.nn.functional.layer_norm(theirs, (7,), gain, bias, 1e-5) * direction).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_plain_norms_put_every_vector_on_the_sphere_of_radius_sqrt_d() -> None:
    x = random(100, 9) * torch.logspace(-3, 3, 100, dtype=torch.float64)[:, None]
    for normalised in (rms_norm(x), layer_norm(x)):
        assert torch.allclose(normalised.norm(dim=-1), torch.full((100,), 3.0, dtype=torch.float64), rtol=ROUNDING)
    assert layer_norm(x).sum(-1).abs().max() < 1e-12


def test_centring_is_the_orthogonal_projection_on_the_hyperplane() -> None:
    basis = hyperplane_basis(6)
    x = random(20, 6)
    assert torch.allclose(basis.T @ basis, torch.eye(5, dtype=torch.float64), atol=1e-14)
    assert basis.sum(0).abs().max() < 1e-14
    assert torch.allclose(centre(x), x @ basis @ basis.T, atol=1e-14)


@given(dim=st.integers(2, 24), seed=st.integers(0, 1000))
def test_every_value_of_torchs_layer_norm_lies_on_the_ellipsoid(dim: int, seed: int) -> None:
    gain, bias = random(dim, seed=seed) + 2.0, random(dim, seed=seed + 1)
    gain = gain.sign() * gain.abs().clamp(min=0.1)
    values = torch.nn.functional.layer_norm(random(50, dim, seed=seed + 2), (dim,), gain, bias, 0.0)
    ellipsoid = layer_ellipsoid(gain, bias)
    assert ellipsoid.lengths.shape == (dim - 1,)
    assert torch.allclose(ellipsoid.level(values), torch.ones(50, dtype=torch.float64), rtol=1e-9)
    assert ellipsoid.off_plane(values).max() < 1e-10
    # Its plane is the one orthogonal to 1/gain.
    assert (ellipsoid.axes.T @ (1 / gain)).abs().max() < 1e-9


def test_rms_ellipsoid_has_its_axes_on_the_coordinates() -> None:
    gain, bias = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64), random(3)
    ellipsoid = rms_ellipsoid(gain, bias)
    assert torch.allclose(ellipsoid.lengths, math.sqrt(3) * gain.abs())
    assert torch.allclose(ellipsoid.axes.abs(), torch.eye(3, dtype=torch.float64))
    assert torch.allclose(ellipsoid.level(rms_norm(random(10, 3), gain, bias)), torch.ones(10, dtype=torch.float64))


def test_without_parameters_the_ellipsoid_is_the_sphere() -> None:
    one, zero = torch.ones(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    assert torch.allclose(layer_ellipsoid(one, zero).lengths, torch.full((15,), 4.0, dtype=torch.float64))


def test_a_zero_gain_takes_a_dimension_away() -> None:
    gain = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    bias = torch.zeros(4, dtype=torch.float64)
    assert rms_ellipsoid(gain, bias).lengths.shape == (3,)
    # A zero gain already removes the coordinate, and the hyperplane then projects on all of the others.
    assert layer_ellipsoid(gain, bias).lengths.shape == (3,)


def test_tangent_is_the_derivative_of_unit() -> None:
    theta, velocity = unit(random(8, 5)), random(8, 5, seed=1)
    _, expected = torch.func.jvp(unit, (theta,), (velocity,))
    assert torch.allclose(tangent(theta, velocity), expected, atol=1e-14)


def test_layer_norm_needs_two_dimensions() -> None:
    with pytest.raises(InputError, match="at least 2 dimensions"):
        layer_ellipsoid(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
