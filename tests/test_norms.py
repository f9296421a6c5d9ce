"""Norms against torch's own layers, and the geometry that the papers give them."""

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from normscope import InputError
from normscope.core.norms import (
    SphereNorm,
    centre,
    cosine,
    factor_between,
    hyperplane_basis,
    layer_ellipsoid,
    layer_norm,
    length,
    orthogonal_part,
    participation_ratio,
    pointwise,
    rms_ellipsoid,
    rms_norm,
    tangent,
    theory_norm,
    unit,
)

ROUNDING = 1e-13
Norm = Callable[[torch.Tensor], torch.Tensor]


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


@pytest.mark.parametrize(("kind", "phi"), [("tanh", np.tanh), ("erf", special.erf)])
def test_pointwise_maps_are_those_of_scipy_and_theory_has_them_for_states_of_norm_1(kind: str, phi: np.ufunc) -> None:
    x, gain, bias = random(5, 16), random(16, seed=1), random(16, seed=2)
    expected = gain.numpy() * phi(0.7 * x.numpy() + 0.2) + bias.numpy()
    assert np.allclose(pointwise(x, kind, 0.7, 0.2, gain, bias).numpy(), expected, atol=1e-14)
    assert torch.allclose(theory_norm(kind)(x / 4), pointwise(x, kind) / 4, atol=1e-15)
    assert theory_norm("layer", quick=True) == SphereNorm("layer", quick=True)


def test_the_orthogonal_part_is_that_of_a_projection_and_all_of_u_where_x_is_zero() -> None:
    u, x = random(6, 5), random(6, 5, seed=1)
    expected = torch.stack([a - b * (a @ b) / (b @ b) for a, b in zip(u, x, strict=True)])
    for size in (1.0, 1e-12, 1e200):
        assert torch.allclose(orthogonal_part(u, size * x), expected, atol=1e-14)
    x[0] = 0
    x.requires_grad_()
    found = orthogonal_part(u, x)
    assert torch.equal(found[0], u[0])
    assert torch.isfinite(torch.autograd.grad(found.sum(), x)[0]).all()


def test_layer_norm_needs_two_dimensions() -> None:
    with pytest.raises(InputError, match="at least 2 dimensions"):
        layer_ellipsoid(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


MAGNITUDES = {
    torch.bfloat16: (-39, -20, 20, 37),
    torch.float32: (-42, -38, -20, -12, 12, 19, 37),
    torch.float64: (-312, -300, -160, -99, 99, 160, 300, 307),
}


@pytest.mark.parametrize(("dtype", "power"), [(dtype, power) for dtype, powers in MAGNITUDES.items() for power in powers])
def test_norms_are_right_for_every_representable_vector(dtype: torch.dtype, power: int) -> None:
    """Against 700 digits, where no square overflows or vanishes."""
    x, y = (random(6, seed=seed).mul(10.0 ** (power // 2)).mul(10.0 ** (power - power // 2)).to(dtype) for seed in (1, 2))
    with mpmath.workdps(700):
        X, Y = ([mpmath.mpf(float(value)) for value in vector] for vector in (x, y))
        norm, other = (mpmath.sqrt(sum(value**2 for value in vector)) for vector in (X, Y))
        flat = [value - sum(X) / 6 for value in X]
        spread = mpmath.sqrt(sum(value**2 for value in flat))
        directions = [float(value / norm) for value in X]
        centred = [float(value / spread * mpmath.sqrt(6)) for value in flat]
        between = float(sum(a * b for a, b in zip(X, Y, strict=True)) / norm / other)
        size = float(norm)
    near = 4 * torch.finfo(dtype).eps
    assert float(length(x)) == pytest.approx(size, rel=near, abs=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    assert unit(x).tolist() == pytest.approx(directions, abs=near)
    assert rms_norm(x).tolist() == pytest.approx([math.sqrt(6) * value for value in directions], abs=2 * near)
    assert layer_norm(x).tolist() == pytest.approx(centred, abs=2 * near)
    assert float(cosine(x, y)) == pytest.approx(between, abs=near)
    assert factor_between(-2 * x, x) == pytest.approx(-2, rel=near)
    assert float(participation_ratio(x)) == pytest.approx(1 / sum(value**4 for value in directions), rel=4 * near)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm, unit, lambda x: rms_norm(x, eps=1e-12)])
@pytest.mark.parametrize("power", [-30, -15, 15, 30])
def test_gradients_of_norms_are_right_where_squares_are_not_representable(norm: Norm, power: int) -> None:
    x, g = random(3, 8) * 10.0**power, random(3, 8, seed=1)
    wide, narrow = x.clone().requires_grad_(), x.float().requires_grad_()
    norm(wide).backward(g)
    norm(narrow).backward(g.float())
    assert wide.grad is not None
    assert narrow.grad is not None
    assert torch.allclose(narrow.grad.double() / wide.grad.abs().max(), wide.grad / wide.grad.abs().max(), atol=1e-5)


def test_large_neighbours_change_no_bit_of_ordinary_vectors() -> None:
    x = random(5, 7).float()
    extreme = torch.cat([x, torch.full((1, 7), 1e30), torch.full((1, 7), 1e-30)])
    for norm in (unit, length, rms_norm, layer_norm):
        assert torch.equal(norm(extreme)[:5], norm(x))
    assert torch.equal(unit(x), x / torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def test_the_zero_vector_has_norm_zero_and_no_direction() -> None:
    zero = torch.zeros(2, 3)
    assert length(zero).tolist() == [[0.0], [0.0]]
    assert unit(zero).isnan().all()
    assert cosine(zero, torch.ones(2, 3)).tolist() == [0.0, 0.0]
    assert rms_norm(zero, eps=1e-12).tolist() == zero.tolist()


def test_quick_directions_are_nan_where_squares_are_not_representable() -> None:
    x = torch.tensor([[3.0, 4.0], [3e25, 4e25], [3e-25, 4e-25]])
    assert unit(x, quick=True)[0].tolist() == unit(x)[0].tolist()
    assert unit(x, quick=True)[1:].isnan().all()
