from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Cauchy,
    Distribution,
    ExpTransform,
    Gamma,
    Gumbel,
    Independent,
    Laplace,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    StudentT,
    TransformedDistribution,
    Uniform,
    constraints,
)

from dubito.priors import (
    FanIn,
    ParameterPrior,
    Pretrained,
    ScaleMixture,
    WeightPrior,
    resolve_prior,
)

SPIKE = math.exp(-6.0)


def mixture_log_prob_reference(w: Tensor, pi: float, s1: float, s2: float) -> Tensor:
    family = MixtureSameFamily(
        Categorical(torch.tensor([pi, 1 - pi], dtype=w.dtype)),
        Normal(torch.zeros(2, dtype=w.dtype), torch.tensor([s1, s2], dtype=w.dtype)),
    )
    return family.log_prob(w)


# ---------------------------------------------------------------- ScaleMixture


@settings(deadline=None, max_examples=25)
@given(pi=st.floats(0.01, 0.99), s1=st.floats(0.1, 3.0), s2=st.floats(1e-3, 0.1), w=st.floats(-6.0, 6.0))
def test_scale_mixture_log_prob_and_cdf_agree_with_torch(pi: float, s1: float, s2: float, w: float) -> None:
    value = torch.tensor(w, dtype=torch.float64)
    prior = ScaleMixture(*(torch.tensor(v, dtype=torch.float64) for v in (pi, s1, s2)))
    torch.testing.assert_close(prior.log_prob(value), mixture_log_prob_reference(value, pi, s1, s2))
    expected = pi * Normal(0.0, s1).cdf(value) + (1 - pi) * Normal(0.0, s2).cdf(value)
    torch.testing.assert_close(prior.cdf(value), expected, rtol=1e-6, atol=1e-7)


def test_scale_mixture_integrates_to_one_and_cdf_is_its_integral() -> None:
    prior = ScaleMixture(
        torch.tensor(0.3, dtype=torch.float64), 1.0, torch.tensor(0.05, dtype=torch.float64), loc=0.5
    )
    grid = torch.linspace(-8, 9, 200_001, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(prior.log_prob(grid).exp(), grid)
    assert integral[-1].item() == pytest.approx(1.0, abs=1e-7)
    torch.testing.assert_close(integral, prior.cdf(grid)[1:], rtol=0, atol=1e-7)


def test_scale_mixture_samples_have_its_moments_and_distribution() -> None:
    prior = ScaleMixture(0.25, 1.0, 0.1, loc=torch.tensor([0.0, 2.0]))
    draws = prior.sample((200_000,), generator=torch.Generator().manual_seed(0))
    assert draws.shape == (200_000, 2)
    fourth = 0.25 * 3 + 0.75 * 3e-4  # central fourth moment of the mixture
    error = math.sqrt((fourth - prior.variance[0].item() ** 2) / 200_000)
    torch.testing.assert_close(draws.var(0), prior.variance, rtol=0, atol=4 * error)
    torch.testing.assert_close(
        draws.mean(0), prior.mean, rtol=0, atol=4 * (prior.variance[0].item() / 2e5) ** 0.5
    )
    below = (draws[:, 0] < 0.1).double().mean().item()
    assert below == pytest.approx(prior.cdf(torch.tensor([0.1, 0.1]))[0].item(), abs=4 * 0.5 / 200_000**0.5)


def test_scale_mixture_sampling_follows_seed_and_generator() -> None:
    prior = ScaleMixture(0.5, 1.0, SPIKE)
    torch.manual_seed(1)
    first = prior.sample((5,))
    torch.manual_seed(1)
    assert torch.equal(first, prior.sample((5,)))
    one, two = (prior.sample((5,), torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, first)


def test_scale_mixture_rsample_gradients_match_those_of_the_moments() -> None:
    parameters = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.4, 1.0, 0.3, 0.2)]
    prior = ScaleMixture(*parameters)
    draws = prior.rsample((400_000,), torch.Generator().manual_seed(0))
    second = torch.autograd.grad(draws.square().mean(), parameters)
    exact = torch.autograd.grad(prior.variance + prior.mean.square(), parameters)
    for estimate, value in zip(second, exact, strict=True):
        assert estimate.item() == pytest.approx(value.item(), abs=0.015)


def test_scale_mixture_expands() -> None:
    prior = ScaleMixture(0.5, 1.0, SPIKE).expand((3, 2))
    assert prior.batch_shape == (3, 2)
    assert prior.log_prob(torch.zeros(3, 2)).shape == (3, 2)
    assert prior.sample((4,)).shape == (4, 3, 2)


@pytest.mark.parametrize("pi", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_scale_mixture_refuses_pi_outside_the_open_interval(pi: float) -> None:
    with pytest.raises(ValueError, match="pi must lie strictly between 0 and 1"):
        ScaleMixture(pi, 1.0, 0.1)


@pytest.mark.parametrize("s", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_mixture_refuses_scales_that_are_not_positive(s: float) -> None:
    with pytest.raises(ValueError, match="s1 is a standard deviation"):
        ScaleMixture(0.5, s, 0.1)
    with pytest.raises(ValueError, match="s2 is a standard deviation"):
        ScaleMixture(0.5, 1.0, s)


def test_t27_scale_mixture_arguments_are_standard_deviations() -> None:
    prior = ScaleMixture(0.5, 0.25, 0.25)
    torch.testing.assert_close(prior.stddev, torch.tensor(0.25))
    torch.testing.assert_close(
        prior.log_prob(torch.tensor(0.3)), Normal(0.0, 0.25).log_prob(torch.tensor(0.3))
    )


def test_t29_mixture_gradient_is_right_far_in_the_tail() -> None:
    weight = torch.tensor([8.0, -8.0, 40.0, 1e4], requires_grad=True)
    log_density = ScaleMixture(0.5, 1.0, SPIKE).log_prob(weight)
    assert log_density.isfinite().all()
    (gradient,) = torch.autograd.grad(log_density.sum(), weight)
    torch.testing.assert_close(gradient, -weight.detach())


def test_t29_mixture_gradient_is_that_of_the_spike_inside_it() -> None:
    weight = torch.tensor(SPIKE, dtype=torch.float64, requires_grad=True)
    prior = ScaleMixture(torch.tensor(0.5, dtype=torch.float64), 1.0, SPIKE)
    (gradient,) = torch.autograd.grad(prior.log_prob(weight), weight)
    share = 1 / (1 + SPIKE * math.exp(0.5))  # responsibility of the spike one of its sds out
    assert gradient.item() == pytest.approx(-share / SPIKE - (1 - share) * SPIKE, rel=1e-3)


def test_t19_whole_numbers_as_prior_parameters() -> None:
    for prior in (
        ScaleMixture(0.5, 1, torch.tensor(2)),
        Normal(torch.tensor(0), torch.tensor(1)),
        Normal(0, 1),
    ):
        resolved = resolve_prior(prior, torch.zeros(3), 4)
        assert isinstance(resolved, ParameterPrior)
        value = torch.tensor([0.5, 1.0, -2.0], dtype=torch.float64)
        assert resolved.log_prob(value).dtype == torch.float64
    exact = ParameterPrior(Normal(0, 1)).log_prob(value)
    torch.testing.assert_close(exact, -0.5 * value**2 - 0.5 * math.log(2 * math.pi), rtol=0, atol=1e-15)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("fan_in", [1, 9, 784])
def test_fan_in_scale_is_exact_in_float64(fan_in: int) -> None:
    prior = resolve_prior(FanIn(gain=2.0), torch.zeros(3), fan_in, centre=1.0)
    assert isinstance(prior, ParameterPrior)
    assert prior.gaussian() == (1.0, 2.0 * fan_in**-0.5)


def test_default_prior_is_fan_in_by_every_name() -> None:
    for spec in (None, "fan_in", FanIn()):
        prior = resolve_prior(spec, torch.zeros(5, 100), 100)
        assert isinstance(prior, ParameterPrior)
        assert prior.gaussian() == (0.0, 0.1)


def test_t13_fan_in_prior_keeps_the_initial_kl_far_below_that_of_a_standard_normal() -> None:
    torch.manual_seed(0)
    width = 1024
    weight = torch.randn(256, width, dtype=torch.float64) * width**-0.5
    posterior = Normal(weight, 0.1 * width**-0.5)
    totals = {}
    for name, spec in (("fan_in", None), ("standard", Normal(0.0, 1.0))):
        prior = resolve_prior(spec, weight, width)
        assert isinstance(prior, ParameterPrior)
        kl = torch.distributions.kl_divergence(posterior, prior.distribution(weight))
        totals[name] = kl.mean().item()
    # -log 0.1 - 1/2 + (0.01 + 1)/2 nats a weight, whatever the width; a standard normal adds log sqrt(width)
    assert totals["fan_in"] == pytest.approx(2.3076, abs=0.01)
    assert totals["standard"] == pytest.approx(math.log(10 * width**0.5) - 0.5, abs=0.01)


def test_pretrained_prior_sits_at_the_value_and_does_not_follow_it() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    before = weight.detach().clone()
    prior = resolve_prior("pretrained", weight, 3)
    assert isinstance(prior, ParameterPrior)
    with torch.no_grad():
        weight += 1.0
    mean, sd = prior.gaussian() or (None, None)
    torch.testing.assert_close(mean, before)
    assert sd == pytest.approx(3**-0.5)
    assert not list(prior.parameters())
    assert list(prior.state_dict()) == ["loc"]
    fixed = resolve_prior(Pretrained(scale=0.02), weight, 3)
    assert isinstance(fixed, ParameterPrior)
    assert (fixed.gaussian() or (0, 0))[1] == pytest.approx(0.02)


def test_pretrained_prior_of_a_bfloat16_parameter_is_kept_in_float32() -> None:
    prior = resolve_prior(Pretrained(scale=0.01), torch.ones(3, dtype=torch.bfloat16), 3)
    assert isinstance(prior, ParameterPrior)
    assert (prior.gaussian() or (0, 0))[1] == pytest.approx(0.01, rel=1e-6)
    assert prior.distribution(torch.ones(3, dtype=torch.bfloat16)).mean.dtype == torch.float32


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rules_refuse_what_is_not_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="gain must be a positive"):
        FanIn(gain=bad)
    with pytest.raises(ValueError, match="scale must be a positive"):
        Pretrained(scale=bad)
    with pytest.raises(ValueError, match="fan_in must be a positive"):
        resolve_prior(None, torch.zeros(2), bad)


def test_pretrained_refuses_nan() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        resolve_prior("pretrained", torch.tensor([1.0, float("nan")]), 2)


# ---------------------------------------------------------------- ParameterPrior

VALUE = torch.tensor([[0.3, -1.2, 2.0], [0.0, 0.7, -0.1]], dtype=torch.float64)
ROWS = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Normal(0.0, 1.0),
    "normal-rows": Normal(torch.zeros(2, 1, dtype=torch.float64), ROWS),
    "normal-all": Normal(VALUE + 1, torch.tensor(0.5, dtype=torch.float64)),
    "laplace": Laplace(0.25, 0.5),
    "student": StudentT(3.0, 0.0, 0.5),
    "cauchy": Cauchy(0.0, 2.0),
    "gumbel": Gumbel(torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)),
    "mixture": ScaleMixture(0.5, 1.0, 0.25),
    "family": MixtureSameFamily(
        Categorical(torch.tensor([0.5, 0.5])), Normal(torch.tensor([-1.0, 1.0]), torch.tensor([0.5, 0.5]))
    ),
    "transformed": TransformedDistribution(Normal(0.0, 1.0), [AffineTransform(1.0, 2.0)]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_parameter_prior_keeps_the_density_and_survives_copies(name: str) -> None:
    given = DISTRIBUTIONS[name]
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    prior = resolve_prior(given, VALUE, 3)
    assert torch.equal(state, torch.random.get_rng_state())  # making a prior draws nothing
    expected = given.log_prob(VALUE)
    assert expected.shape == VALUE.shape
    assert isinstance(prior, ParameterPrior)
    for copied in (prior, copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        torch.testing.assert_close(copied.log_prob(VALUE), expected, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(copied.log_prob(VALUE.expand(4, 2, 3))[2], expected, rtol=1e-7, atol=1e-9)


def test_parameter_prior_keeps_scalars_as_floats_and_broadcast_copies_out_of_memory() -> None:
    prior = ParameterPrior(Normal(torch.zeros(50, 40), 0.5))
    assert prior.get_buffer("loc").shape == (50, 40)
    assert (prior.gaussian() or (0, 0))[1] == 0.5
    rows = ParameterPrior(Normal(torch.zeros(50, 1), 0.5).expand((50, 40)))
    assert rows.get_buffer("loc").shape == (50, 1)
    assert rows.batch_shape == (50, 40)
    assert list(ParameterPrior(Normal(0.0, 1.0).expand((50, 40))).state_dict()) == []
    assert ParameterPrior(Laplace(0.0, 1.0)).gaussian() is None


def test_parameter_prior_state_moves_between_objects_and_dtypes() -> None:
    one = ParameterPrior(Normal(torch.arange(3.0), torch.tensor([1.0, 2.0, 3.0])))
    two = ParameterPrior(Normal(torch.zeros(3), torch.ones(3)))
    two.load_state_dict(one.state_dict())
    value = torch.tensor([1.0, 1.0, 1.0])
    torch.testing.assert_close(one.log_prob(value), two.log_prob(value))
    assert two.to(torch.float64).get_buffer("loc").dtype == torch.float64
    assert two.distribution(value.bfloat16()).mean.dtype == torch.float32
    assert two.log_prob(value.half()).dtype == torch.float32
    assert "Normal" in repr(two)


def test_t03_each_parameter_keeps_the_standard_deviation_of_its_own_prior() -> None:
    narrow = resolve_prior(Normal(0.0, 0.1), torch.zeros(2), 2)
    wide = resolve_prior(Normal(0.0, 3.0), torch.zeros(2), 2)
    assert isinstance(narrow, ParameterPrior)
    assert isinstance(wide, ParameterPrior)
    for prior, sd in ((narrow, 0.1), (wide, 3.0)):
        torch.testing.assert_close(prior.distribution(torch.zeros(2)).stddev, torch.tensor(sd))


class Doubling(Distribution):
    """A class whose constructor changes what it is given: rebuilding it from its attributes would double."""

    arg_constraints = {"scale": constraints.positive}  # noqa: RUF012
    support = constraints.real

    def __init__(self, scale: float | Tensor, validate_args: bool | None = None) -> None:
        self.scale = 2.0 * torch.as_tensor(scale)
        super().__init__(validate_args=validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        return Normal(0.0, self.scale).log_prob(value)


class Silent(Distribution):
    arg_constraints = {}  # noqa: RUF012
    support = constraints.real


def test_a_users_own_distribution_is_kept_as_it_is_where_rebuilding_would_change_it() -> None:
    prior = ParameterPrior(Doubling(1.0))
    torch.testing.assert_close(prior.log_prob(torch.ones(2)), Normal(0.0, 2.0).log_prob(torch.ones(2)))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "wrong",
    [
        Gamma(1.0, 1.0),
        Uniform(-1.0, 1.0),
        Bernoulli(0.5),
        TransformedDistribution(Normal(0.0, 1.0), [ExpTransform()]),
        MixtureSameFamily(Categorical(torch.ones(2)), Gamma(torch.ones(2), torch.ones(2))),
    ],
)
def test_prior_on_the_wrong_support(wrong: Distribution) -> None:
    with pytest.raises(ValueError, match="prior on the wrong support"):
        resolve_prior(wrong, torch.zeros(2), 2)


@pytest.mark.parametrize(
    "wrong", [Independent(Normal(torch.zeros(2), 1.0), 1), MultivariateNormal(torch.zeros(2), torch.eye(2))]
)
def test_prior_with_event_dimensions(wrong: Distribution) -> None:
    with pytest.raises(ValueError, match="event shape"):
        resolve_prior(wrong, torch.zeros(2), 2)


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3), (3, 2)])
def test_prior_whose_batch_shape_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not broadcast to the parameter's shape"):
        resolve_prior(Normal(torch.zeros(shape), 1.0), torch.zeros(2, 3), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        Normal(float("nan"), 1.0, validate_args=False),
        Normal(0.0, float("inf"), validate_args=False),
        Normal(0.0, -1.0, validate_args=False),
        TransformedDistribution(Normal(float("nan"), 1.0, validate_args=False), [AffineTransform(0.0, 1.0)]),
    ],
)
def test_prior_with_unsound_parameters(wrong: Distribution) -> None:
    with pytest.raises(ValueError, match=r"NaN|must satisfy"):
        resolve_prior(wrong, torch.zeros(2), 2)


def test_prior_that_requires_gradient_is_not_frozen_silently() -> None:
    scale = torch.tensor(1.0, requires_grad=True)
    for wrong in (
        Normal(0.0, scale),
        TransformedDistribution(Normal(0.0, scale), [AffineTransform(0.0, 1.0)]),
    ):
        with pytest.raises(ValueError, match="WeightPrior"):
            resolve_prior(wrong, torch.zeros(2), 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (1.0, "got float"),
        (Normal, "give an instance"),
        (FanIn, "give an instance"),
        (Silent(), "no log_prob"),
    ],
)
def test_what_is_no_prior_at_all(wrong: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        resolve_prior(wrong, torch.zeros(2), 2)  # type: ignore[arg-type]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fan_in', 'pretrained'"):
        resolve_prior("gaussian", torch.zeros(2), 2)


# ---------------------------------------------------------------- WeightPrior


class Correlated(WeightPrior):
    """A full-covariance Gaussian over two parameters, scale learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.zeros(()))

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([w.flatten() for w in weights.values()])
        covariance = (torch.eye(len(flat)) + 0.5) * torch.exp(2 * self.log_scale)
        return MultivariateNormal(torch.zeros(len(flat)), covariance).log_prob(flat)


def test_weight_prior_passes_through_and_trains() -> None:
    prior = Correlated()
    assert resolve_prior(prior, torch.zeros(2), 2) is prior
    weights = {"a": torch.ones(2), "b": torch.zeros(1, 2)}
    prior.log_prob(weights).backward()
    # d/ds of -D s - ½ exp(-2s) wᵀC⁻¹w at s = 0
    precision = torch.linalg.inv(torch.eye(4) + 0.5)
    flat = torch.tensor([1.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(prior.log_scale.grad, flat @ precision @ flat - 4)


@pytest.mark.parametrize("ability", ["kl", "whiten", "unwhiten"])
def test_weight_prior_capabilities_say_what_to_do(ability: str) -> None:
    with pytest.raises(NotImplementedError, match="override"):
        getattr(Correlated(), ability)({})


def test_resolved_prior_passes_through() -> None:
    prior = ParameterPrior(Normal(0.0, 1.0))
    assert resolve_prior(prior, torch.zeros(2), 2) is prior
