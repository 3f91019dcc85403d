from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import (
    Categorical,
    Cauchy,
    Distribution,
    Gamma,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
)
from torch.distributions import kl_divergence as torch_kl

from dubito.divergences import (
    gaussian_kl,
    kl_divergence,
    wasserstein2_gaussian_diagonal,
    wasserstein2_gaussian_factors,
)
from dubito.priors import FanIn, ParameterPrior, ScaleMixture, resolve_prior

SPIKE = math.exp(-6.0)
F64 = {"dtype": torch.float64}


def double(*values: float) -> list[Tensor]:
    return [torch.tensor(v, **F64) for v in values]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_normal(shape: tuple[int, ...], seed: int) -> Normal:
    g = generator(seed)
    return Normal(torch.randn(shape, generator=g, **F64), torch.rand(shape, generator=g, **F64) + 0.05)


# ---------------------------------------------------------------- Gaussian KL


@pytest.mark.parametrize("shape", [(), (7,), (40, 30), (2, 3, 5, 5)])
def test_gaussian_kl_is_the_sum_of_torch_values(shape: tuple[int, ...]) -> None:
    q, p = random_normal(shape, 0), random_normal(shape, 1)
    value = gaussian_kl(q.mean, q.scale.log(), p.mean, p.scale)
    torch.testing.assert_close(value, torch_kl(q, p).sum(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kl_divergence(q, p), torch_kl(q, p), rtol=1e-10, atol=1e-12)
    scalar = gaussian_kl(q.mean, q.scale.log(), 0.3, 0.7)
    prior = Normal(*double(0.3, 0.7))
    torch.testing.assert_close(scalar, torch_kl(q, prior).sum(), rtol=1e-10, atol=1e-12)


def test_gaussian_kl_agrees_with_the_prior_of_a_parameter() -> None:
    q = random_normal((20, 10), 3)
    prior = resolve_prior(FanIn(), q.mean, 10)
    assert isinstance(prior, ParameterPrior)
    expected = torch_kl(q, Normal(*double(0.0, 10**-0.5))).sum()
    mean, sd = prior.gaussian() or (0, 0)
    torch.testing.assert_close(gaussian_kl(q.mean, q.scale.log(), mean, sd), expected)
    torch.testing.assert_close(kl_divergence(q, prior.distribution(q.mean)).sum(), expected)


def test_gaussian_kl_gradients() -> None:
    q, p = random_normal((3, 2), 0), random_normal((3, 2), 1)
    inputs = [t.clone().requires_grad_() for t in (q.mean, q.scale.log(), p.mean, p.scale)]
    assert torch.autograd.gradcheck(gaussian_kl, inputs)
    assert torch.autograd.gradgradcheck(gaussian_kl, inputs)
    for prior in ((), (0.3, 0.7), (p.mean, p.scale)):  # a fixed prior takes a path of its own
        fixed = [*inputs[:2], *prior]
        assert torch.autograd.gradcheck(gaussian_kl, fixed)
        assert torch.autograd.gradgradcheck(gaussian_kl, fixed)


def test_gaussian_kl_paths_agree_also_under_vmap_and_grad() -> None:
    q, p = random_normal((4, 3), 0), random_normal((4, 3), 1)
    log_sd = q.scale.log()
    learned = gaussian_kl(q.mean, log_sd, p.mean, p.scale.clone().requires_grad_())
    torch.testing.assert_close(gaussian_kl(q.mean, log_sd, p.mean, p.scale), learned.detach())
    rows = torch.vmap(lambda m, s: gaussian_kl(m, s, 0.1, 0.5))(q.mean, log_sd)
    expected = torch.stack([gaussian_kl(m, s, 0.1, 0.5) for m, s in zip(q.mean, log_sd, strict=True)])
    torch.testing.assert_close(rows, expected)
    gradient = torch.func.grad(lambda s: gaussian_kl(q.mean, s, 0.1, 0.5))(log_sd)
    torch.testing.assert_close(gradient, torch.expm1(2 * (log_sd - math.log(0.5))))


def test_t01_sign_of_the_log_ratio() -> None:
    mean, log_sd = torch.zeros(1, **F64), torch.tensor([-3.0], **F64)  # log variance -6
    assert gaussian_kl(mean, log_sd).item() == pytest.approx(2.501239, abs=1e-6)
    log_sd.requires_grad_()
    (gradient,) = torch.autograd.grad(gaussian_kl(mean, log_sd), log_sd)
    assert gradient.item() < 0  # falling along it widens the posterior towards the prior
    for _ in range(200):
        (gradient,) = torch.autograd.grad(gaussian_kl(mean, log_sd), log_sd)
        with torch.no_grad():
            log_sd -= 0.2 * gradient
    assert log_sd.item() == pytest.approx(0.0, abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(
    mean=st.floats(-5, 5), log_sd=st.floats(-8, 3), prior_mean=st.floats(-5, 5), log_prior=st.floats(-5, 3)
)
def test_gaussian_kl_is_never_negative(
    mean: float, log_sd: float, prior_mean: float, log_prior: float
) -> None:
    value = gaussian_kl(torch.tensor(mean), torch.tensor(log_sd), prior_mean, math.exp(log_prior))
    assert value.item() >= 0.0


def test_gaussian_kl_keeps_its_digits_beside_the_prior() -> None:
    u = 1e-3
    value = gaussian_kl(torch.zeros(()), torch.tensor(u)).item()  # float32
    assert value == pytest.approx(0.5 * (math.expm1(2 * u) - 2 * u), rel=1e-3)


@pytest.mark.parametrize("log_sd", [-120.0, -80.0, -40.0, 38.0])
def test_t18_t28_gaussian_kl_is_finite_in_extremes(log_sd: float) -> None:
    raw = torch.full((3,), log_sd, requires_grad=True)
    value = gaussian_kl(torch.zeros(3), raw, 0.0, 1e-2)
    assert value.isfinite()
    value.backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()


@pytest.mark.parametrize("kind", [Normal, Laplace])
@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e15])
def test_t18_t28_elementwise_kl_is_finite_in_extremes(kind: type[Distribution], scale: float) -> None:
    exact = kl_divergence(kind(*double(0.5, scale)), Normal(*double(0.0, 1.0)))
    sigma = torch.tensor(scale, requires_grad=True)
    value = kl_divergence(kind(torch.tensor(0.5), sigma), Normal(0.0, 1.0))
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)
    value.backward()
    assert sigma.grad is not None
    assert sigma.grad.isfinite()


def test_t26_gaussian_kl_is_a_sum_and_grows_with_the_number_of_weights() -> None:
    small = gaussian_kl(torch.ones(10, 10, **F64), torch.zeros(10, 10, **F64))
    large = gaussian_kl(torch.ones(100, 50, **F64), torch.zeros(100, 50, **F64))
    assert small.item() == pytest.approx(50.0)
    assert large.item() == pytest.approx(2500.0)


def test_gaussian_kl_of_half_precision_is_computed_in_float32() -> None:
    mean = torch.randn(500, generator=generator()).bfloat16()
    log_sd = torch.full_like(mean, -3.0)
    value = gaussian_kl(mean, log_sd, 0.0, 1.0)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), gaussian_kl(mean.double(), log_sd.double()), rtol=1e-5, atol=0)
    q = Normal(mean, log_sd.exp())
    assert kl_divergence(q, ScaleMixture(0.5, 1.0, SPIKE)).dtype == torch.float32


def test_gaussian_kl_refuses_shapes_that_would_multiply_the_entries() -> None:
    for arguments in (
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(3), torch.zeros(3), torch.zeros(2, 3)),
        (torch.zeros(3), torch.zeros(3), 0.0, torch.ones(4)),
    ):
        with pytest.raises(ValueError, match="does not broadcast"):
            gaussian_kl(*arguments)  # type: ignore[arg-type]
    assert gaussian_kl(torch.zeros(3), torch.zeros(())).item() == 0.0


@pytest.mark.parametrize("sd", [0.0, -1.0, float("nan"), float("inf")])
def test_gaussian_kl_refuses_a_prior_sd_that_is_none(sd: float) -> None:
    with pytest.raises(ValueError, match="prior_sd must be a positive"):
        gaussian_kl(torch.zeros(3), torch.zeros(3), 0.0, sd)


# ---------------------------------------------------------------- other closed forms


@pytest.mark.parametrize(
    ("q", "p"),
    [
        (Laplace(*double(0.3, 0.4)), Normal(*double(-0.2, 0.9))),
        (Laplace(*double(0.3, 0.4)), Laplace(*double(-0.2, 0.9))),
        (Normal(*double(0.3, 0.4)), Laplace(*double(-0.2, 0.9))),
    ],
)
def test_closed_forms_agree_with_torch_and_monte_carlo(q: Distribution, p: Distribution) -> None:
    closed = kl_divergence(q, p, method="closed")
    torch.testing.assert_close(closed, torch_kl(q, p))
    draws = q.sample((400_000,))
    ratio = q.log_prob(draws) - p.log_prob(draws)
    error = (ratio.std() / len(ratio) ** 0.5).item()
    assert closed.item() == pytest.approx(ratio.mean().item(), abs=4 * error)


def test_closed_where_there_is_none_says_what_to_use() -> None:
    with pytest.raises(NotImplementedError, match="monte_carlo"):
        kl_divergence(Normal(0.0, 1.0), StudentT(3.0), method="closed")
    with pytest.raises(NotImplementedError, match="bound"):
        kl_divergence(Normal(0.0, 1.0), ScaleMixture(0.5, 1.0, SPIKE), method="closed")


# ---------------------------------------------------------------- bound for mixtures


def mixture_kl_by_quadrature(mean: float, sd: float, pi: float, s2: float) -> float:
    """E_q log q - E_q log p on grids fine enough for both the posterior and the spike."""
    q = Normal(*double(mean, sd))
    p = ScaleMixture(*double(pi, 1.0, s2))
    ends = [mean - 12 * sd, mean + 12 * sd]
    coarse = torch.linspace(*ends, 200_001, **F64)
    fine = torch.linspace(-12 * s2, 12 * s2, 200_001, **F64)
    grid = torch.cat([coarse, fine[(fine > ends[0]) & (fine < ends[1])]]).sort().values
    density = q.log_prob(grid)
    return torch.trapezoid(density.exp() * (density - p.log_prob(grid)), grid).item()


GRID = [(pi, mean, sd) for pi in (0.25, 0.5, 0.75) for mean in (0.0, 0.1, 1.0) for sd in (0.002, 0.05, 0.5)]


@pytest.mark.parametrize(("pi", "mean", "sd"), GRID)
def test_mixture_bound_is_above_the_truth_and_tight(pi: float, mean: float, sd: float) -> None:
    bound = kl_divergence(
        Normal(*double(mean, sd)), ScaleMixture(*double(pi, 1.0, SPIKE)), method="bound"
    ).item()
    exact = mixture_kl_by_quadrature(mean, sd, pi, SPIKE)
    assert -1e-6 <= bound - exact <= 0.73


def test_mixture_bound_is_within_a_tenth_of_a_nat_almost_everywhere() -> None:
    gaps = []
    for pi, mean, sd in GRID:
        q, p = Normal(*double(mean, sd)), ScaleMixture(*double(pi, 1.0, SPIKE))
        gaps.append(
            kl_divergence(q, p, method="bound").item() - mixture_kl_by_quadrature(mean, sd, pi, SPIKE)
        )
    small = sum(gap <= 0.1 for gap in gaps)
    assert small >= 0.75 * len(gaps), sorted(gaps)


def test_mixture_bound_against_a_million_draws_at_its_worst() -> None:
    q, p = Normal(*double(0.0, 0.05)), ScaleMixture(*double(0.25, 1.0, SPIKE))
    bound = kl_divergence(q, p, method="bound").item()
    draws = q.mean + q.scale * torch.randn(1_000_000, generator=generator(), **F64)
    ratio = q.log_prob(draws) - p.log_prob(draws)
    error = ratio.std().item() / 1000
    assert bound >= ratio.mean().item() - error
    assert bound == pytest.approx(3.88, abs=0.01)
    assert ratio.mean().item() == pytest.approx(3.16, abs=0.01 + 3 * error)
    assert bound - ratio.mean().item() == pytest.approx(0.72, abs=0.01 + 3 * error)


def test_mixture_bound_is_exact_for_equal_components_and_auto_takes_it() -> None:
    q = random_normal((4, 3), 5)
    same = ScaleMixture(*double(0.3, 0.7, 0.7))
    expected = torch_kl(q, Normal(*double(0.0, 0.7)))
    torch.testing.assert_close(kl_divergence(q, same, method="bound"), expected)
    p = ScaleMixture(*double(0.5, 1.0, SPIKE))
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(q, p, method="bound"))


@pytest.mark.parametrize("kind", [Normal, Laplace])
def test_mixture_bound_of_a_torch_mixture_is_that_of_the_scale_mixture(kind: type[Distribution]) -> None:
    base = random_normal((4, 3), 5)
    q = kind(base.loc, base.scale)
    family = MixtureSameFamily(
        Categorical(torch.tensor([0.25, 0.75], **F64)),
        Normal(torch.zeros(2, **F64), torch.tensor([1.0, 0.1], **F64)),
    )
    expected = kl_divergence(q, ScaleMixture(*double(0.25, 1.0, 0.1)))
    torch.testing.assert_close(kl_divergence(q, family, method="bound"), expected)
    torch.testing.assert_close(kl_divergence(q, family), expected)


def test_mixture_bound_is_differentiable_and_finite_in_extremes() -> None:
    loc, scale = (t.clone().requires_grad_() for t in double(0.3, 0.2))
    p = ScaleMixture(*double(0.5, 1.0, SPIKE))
    assert torch.autograd.gradcheck(lambda m, s: kl_divergence(Normal(m, s), p, method="bound"), (loc, scale))
    far = torch.tensor([8.0, 1e4], requires_grad=True)
    value = kl_divergence(Normal(far, torch.tensor(1e-20)), ScaleMixture(0.5, 1.0, SPIKE))
    assert value.isfinite().all()
    (gradient,) = torch.autograd.grad(value.sum(), far)
    torch.testing.assert_close(gradient, far.detach())  # the slab's pull, w / s1²


def test_bound_of_what_is_no_mixture() -> None:
    with pytest.raises(NotImplementedError, match="closed"):
        kl_divergence(Normal(0.0, 1.0), Normal(0.0, 1.0), method="bound")
    with pytest.raises(NotImplementedError, match="monte_carlo"):
        kl_divergence(StudentT(3.0), ScaleMixture(0.5, 1.0, SPIKE), method="bound")


# ---------------------------------------------------------------- Monte Carlo


@pytest.mark.parametrize("kind", [Normal, Laplace])
def test_monte_carlo_agrees_with_the_closed_form_and_its_gradient(kind: type[Distribution]) -> None:
    loc, scale = (t.clone().requires_grad_() for t in double(0.4, 0.3))
    p = Normal(*double(0.0, 1.0))
    exact = kl_divergence(kind(loc, scale), p)
    estimate = kl_divergence(kind(loc, scale), p, "monte_carlo", samples=200_000, generator=generator())
    # sd of one term is at most about one nat here
    assert estimate.item() == pytest.approx(exact.item(), abs=4 / 200_000**0.5)
    for a, b in zip(
        torch.autograd.grad(exact, (loc, scale)), torch.autograd.grad(estimate, (loc, scale)), strict=True
    ):
        assert b.item() == pytest.approx(a.item(), abs=0.02)


def test_t04_monte_carlo_is_a_mean_over_draws() -> None:
    q, p = Normal(*double(0.4, 0.3)), Cauchy(*double(0.0, 1.0))
    few = kl_divergence(q, p, samples=2_000, generator=generator(1)).item()
    many = kl_divergence(q, p, samples=40_000, generator=generator(2)).item()
    assert few == pytest.approx(many, abs=0.1)


def test_t08_monte_carlo_gradient_has_the_direct_and_the_path_part() -> None:
    loc, scale = (t.clone().requires_grad_() for t in double(0.4, 0.3))
    noise = torch.randn((1,), generator=generator(7), **F64)
    w = loc.detach() + scale.detach() * noise
    value = kl_divergence(Normal(loc, scale), StudentT(*double(3.0)), samples=1, generator=generator(7))
    by_loc, by_scale = torch.autograd.grad(value, (loc, scale))
    pull = 4 * w / (3 + w**2)  # -d log p / dw of Student's t with three degrees of freedom
    torch.testing.assert_close(by_loc, pull.squeeze())
    torch.testing.assert_close(by_scale, (pull * noise - 1 / scale.detach()).squeeze())


def test_monte_carlo_follows_seed_and_generator() -> None:
    q, p = Normal(torch.zeros(3), 0.5), StudentT(3.0)
    torch.manual_seed(4)
    first = kl_divergence(q, p, "monte_carlo", samples=4)
    torch.manual_seed(4)
    assert torch.equal(first, kl_divergence(q, p, "monte_carlo", samples=4))
    state = torch.random.get_rng_state()
    for posterior in (q, StudentT(5.0, torch.zeros(3))):  # the second has no generator of its own
        one, two = (kl_divergence(posterior, p, samples=4, generator=generator(9)) for _ in range(2))
        other = kl_divergence(posterior, p, samples=4, generator=generator(10))
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_monte_carlo_is_accumulated_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dubito.divergences._ELEMENTS_AT_ONCE", 7)
    q, p = random_normal((3,), 0), Normal(*double(0.0, 1.0))
    value = kl_divergence(q, p, "monte_carlo", samples=5001, generator=generator())
    torch.testing.assert_close(value, kl_divergence(q, p), rtol=0, atol=0.1)


def test_monte_carlo_of_a_joint_distribution() -> None:
    covariance = torch.tensor([[1.0, 0.4], [0.4, 0.5]], **F64)
    q = MultivariateNormal(torch.zeros(2, **F64), covariance)
    p = MultivariateNormal(torch.ones(2, **F64), torch.eye(2, **F64))
    value = kl_divergence(q, p, "monte_carlo", samples=20_000, generator=generator())
    assert value.item() == pytest.approx(torch_kl(q, p).item(), abs=0.05)
    with pytest.raises(ValueError, match="event shape"):
        kl_divergence(q, Normal(0.0, 1.0))


def test_kl_arguments_are_checked() -> None:
    q, p = Normal(0.0, 1.0), StudentT(3.0)
    with pytest.raises(ValueError, match="'auto', 'closed', 'bound', 'monte_carlo'"):
        kl_divergence(q, p, method="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples must be at least 1"):
        kl_divergence(q, p, samples=0)
    with pytest.raises(TypeError, match="samples must be a whole number"):
        kl_divergence(q, p, samples=2.5)  # type: ignore[arg-type]
    mixture = MixtureSameFamily(Categorical(torch.ones(2)), LogNormal(torch.zeros(2), torch.ones(2)))
    with pytest.raises(NotImplementedError, match="rsample"):
        kl_divergence(mixture, Gamma(1.0, 1.0), method="monte_carlo")


# ---------------------------------------------------------------- Wasserstein


def trace_formula(m1: Tensor, c1: Tensor, m2: Tensor, c2: Tensor) -> float:
    def root(c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(c)
        return vectors * values.clamp_min(0).sqrt() @ vectors.mT

    middle = root(root(c1) @ c2 @ root(c1))
    return ((m1 - m2).square().sum() + (c1 + c2 - 2 * middle).trace()).item()


@pytest.mark.parametrize(
    ("size", "r1", "r2"), [(6, 6, 6), (6, 2, 3), (6, 3, 1), (5, 8, 2), (4, 1, 1), (4, 9, 7)]
)
def test_wasserstein_factors_against_the_trace_and_nuclear_formulas(size: int, r1: int, r2: int) -> None:
    g = generator(size + r1)
    m1, m2 = torch.randn(2, size, generator=g, **F64)
    S1, S2 = torch.randn(size, r1, generator=g, **F64), torch.randn(size, r2, generator=g, **F64)
    value = wasserstein2_gaussian_factors(m1, S1, m2, S2)
    # the square root of a singular matrix loses half the digits in the dense formula, not in ours
    assert value.item() == pytest.approx(trace_formula(m1, S1 @ S1.mT, m2, S2 @ S2.mT), abs=1e-6)
    nuclear = torch.linalg.matrix_norm(S1.mT @ S2, "nuc")
    factors = S1.square().sum() + S2.square().sum() - 2 * nuclear
    torch.testing.assert_close(value, (m1 - m2).square().sum() + factors)
    torch.testing.assert_close(value, wasserstein2_gaussian_factors(m2, S2, m1, S1))


def test_wasserstein_is_zero_at_equality_whatever_the_rotation_of_the_factor() -> None:
    S = torch.randn(50, 4, generator=generator())
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator(1))).Q
    m = torch.randn(50, generator=generator(2))
    value = wasserstein2_gaussian_factors(m, S, m, S @ rotation)  # float32
    assert 0.0 <= value.item() < 1e-9


def test_wasserstein_to_a_point_and_of_diagonals() -> None:
    m = torch.zeros(3, **F64)
    sd1, sd2 = torch.tensor([1.0, 2.0, 0.0], **F64), torch.tensor([0.5, 2.5, 3.0], **F64)
    dense = wasserstein2_gaussian_factors(m, sd1.diag(), m + 1, sd2.diag())
    torch.testing.assert_close(wasserstein2_gaussian_diagonal(m, sd1, m + 1, sd2), dense)
    point = wasserstein2_gaussian_factors(m, sd1.diag(), m, torch.zeros(3, 0, **F64))
    assert point.item() == pytest.approx(5.0)
    assert wasserstein2_gaussian_factors(m, sd1.diag(), m, torch.zeros(3, 2, **F64)).item() == pytest.approx(
        5.0
    )


def test_wasserstein_gradient_is_exact() -> None:
    g = generator()
    inputs = [torch.randn(s, generator=g, **F64).requires_grad_() for s in ((5,), (5, 2), (5,), (5, 3))]
    assert torch.autograd.gradcheck(wasserstein2_gaussian_factors, inputs)
    swapped = [inputs[2], inputs[3], inputs[0], inputs[1]]
    assert torch.autograd.gradcheck(wasserstein2_gaussian_factors, swapped)
    assert torch.autograd.gradcheck(wasserstein2_gaussian_diagonal, [t[:, 0] for t in inputs[1::2]] * 2)


@pytest.mark.parametrize("case", ["coinciding", "zero", "rank-deficient", "equal"])
def test_wasserstein_gradient_is_finite_where_singular_values_coincide_or_vanish(case: str) -> None:
    eye = torch.eye(6, 3, **F64)
    other = {
        "coinciding": 2 * eye,  # S1ᵀS2 = 2 I
        "zero": torch.eye(6, **F64)[:, 3:],  # S1ᵀS2 = 0
        "rank-deficient": torch.ones(6, 3, **F64),
        "equal": eye.clone(),
    }[case]
    S1, S2 = eye.requires_grad_(), other.requires_grad_()
    m = torch.zeros(6, **F64)
    wasserstein2_gaussian_factors(m, S1, m, S2).backward()
    assert S1.grad is not None
    assert S2.grad is not None
    assert S1.grad.isfinite().all()
    assert S2.grad.isfinite().all()
    if case == "coinciding":  # smooth there: gradient 2 (S1 - S2)
        torch.testing.assert_close(S1.grad, -2 * torch.eye(6, 3, **F64))
    if case == "equal":
        torch.testing.assert_close(S1.grad, torch.zeros(6, 3, **F64), rtol=0, atol=1e-12)


def test_wasserstein_shapes_are_checked() -> None:
    m, S = torch.zeros(4), torch.zeros(4, 2)
    for arguments in ((m, S, torch.zeros(3), S), (m, torch.zeros(3, 2), m, S), (m, m, m, S), (S, S, S, S)):
        with pytest.raises(ValueError, match=r"means must be \(P,\)"):
            wasserstein2_gaussian_factors(*arguments)
    with pytest.raises(ValueError, match="one shape"):
        wasserstein2_gaussian_diagonal(m, m, m, torch.ones(1))
