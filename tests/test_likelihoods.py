"""Likelihoods against torch.nn.functional and torch.distributions; shapes; errors for people."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from dubito.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    likelihood_from_config,
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(*shape, classes=4):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(7))


# -- values ----------------------------------------------------------------------------------------


def test_categorical_is_cross_entropy():
    outputs, y = randn(6, 4), labels(6)
    assert torch.allclose(Categorical().log_prob(outputs, y), -F.cross_entropy(outputs, y, reduction="none"))
    assert torch.allclose(Categorical().nll(outputs, y), F.cross_entropy(outputs, y))
    assert torch.allclose(Categorical().nll(outputs, y.to(torch.uint8)), F.cross_entropy(outputs, y))


def test_categorical_on_images_and_sequences_sums_over_outcomes():
    images, y = randn(3, 4, 5, 2), labels(3, 5, 2)
    summed = -F.cross_entropy(images, y, reduction="none").sum((1, 2))
    assert torch.allclose(Categorical(dim=-3).log_prob(images, y), summed)
    assert torch.allclose(Categorical(dim=-3).nll(images, y), 10 * F.cross_entropy(images, y))
    sequence = images.movedim(1, -1)
    assert torch.allclose(Categorical().log_prob(sequence, y), summed)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)])
def test_bernoulli_is_binary_cross_entropy(shape):
    outputs, y = randn(*shape), labels(*shape, classes=2)
    loss = F.binary_cross_entropy_with_logits(outputs, y.double(), reduction="none").reshape(6, -1).sum(-1)
    for target in (y, y.bool(), y.double()):
        assert torch.allclose(Bernoulli().log_prob(outputs, target), -loss)
    assert torch.allclose(Bernoulli().nll(outputs, y), loss.mean())


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 5, 3)])
def test_gaussian_is_the_normal_density(shape):
    outputs, y = randn(*shape), randn(*shape, seed=1)
    expected = Normal(outputs, 0.7).log_prob(y).reshape(6, -1).sum(-1)
    assert torch.allclose(Gaussian(0.7).log_prob(outputs, y), expected)
    assert torch.allclose(Gaussian(0.7).nll(outputs, y), -expected.mean())


def test_gaussian_with_noise_of_each_feature():
    likelihood = Gaussian(0.5, learned=True, features=3).double()
    with torch.no_grad():
        likelihood.log_noise.copy_(torch.tensor([0.1, 1.0, 3.0]).log())
    outputs, y = randn(6, 3), randn(6, 3, seed=1)
    oracle = Independent(Normal(outputs, torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)), 1)
    assert torch.allclose(likelihood.log_prob(outputs, y), oracle.log_prob(y), rtol=1e-6)
    p = likelihood.predictive(outputs.unsqueeze(0))
    assert torch.allclose(p.aleatoric[2], torch.tensor([0.01, 1.0, 9.0], dtype=torch.float64))


def test_heteroscedastic_reads_mean_and_scale():
    outputs, y = randn(6, 4), randn(6, 2, seed=1)
    sds = F.softplus(outputs[:, 2:]) + 0.01
    likelihood = HeteroscedasticGaussian(floor=0.01)
    assert torch.allclose(likelihood.log_prob(outputs, y), Normal(outputs[:, :2], sds).log_prob(y).sum(-1))
    deep = torch.full((1, 2), -1e4)
    assert likelihood.predictive(deep.unsqueeze(0)).aleatoric.item() == pytest.approx(1e-4)


CASES = [
    (Categorical(), (6, 4), labels(6)),
    (Categorical(dim=-3), (6, 4, 2, 3), labels(6, 2, 3)),
    (Bernoulli(), (6,), labels(6, classes=2)),
    (Bernoulli(), (6, 3), labels(6, 3, classes=2)),
    (Gaussian(0.3), (6, 1), randn(6, 1)),
    (Gaussian(0.3, features=2), (6, 2), randn(6, 2)),
    (HeteroscedasticGaussian(), (6, 4), randn(6, 2)),
]


@pytest.mark.parametrize(("likelihood", "shape", "y"), CASES)
def test_leading_draws_are_recognised(likelihood, shape, y):
    draws = randn(5, *shape)
    each = torch.stack([likelihood.log_prob(draw, y) for draw in draws])
    assert each.shape == (5, 6)
    assert torch.allclose(likelihood.log_prob(draws, y), each)
    assert torch.allclose(likelihood.nll(draws, y), -each.mean())


@pytest.mark.parametrize(("likelihood", "shape", "y"), CASES)
@pytest.mark.parametrize("keep", [True, False])
def test_predictive_is_the_average_over_draws(likelihood, shape, y, keep):
    draws = randn(5, *shape)
    p = likelihood.predictive(draws, keep_draws=keep, consistent=False)
    assert (p.samples, len(p), p.consistent, p.draws is not None) == (5, 6, False, keep)
    assert torch.allclose(p.variance, p.aleatoric + p.epistemic)
    if keep:
        averaged = likelihood.log_prob(draws, y).logsumexp(0) - math.log(5)
        assert torch.allclose(p.log_prob(y), averaged)


def test_t09_classifier_averages_probabilities_per_draw():
    draws = randn(5, 6, 4)
    assert torch.allclose(Categorical().predictive(draws).probs, draws.softmax(-1).mean(0))
    assert torch.allclose(Bernoulli().predictive(draws).probs, draws.sigmoid().mean(0))


def test_t10_aleatoric_variance_comes_from_the_likelihood():
    draws = randn(5, 6, 2)
    p = Gaussian(noise=0.5).predictive(draws)
    assert torch.allclose(p.aleatoric, torch.tensor(0.25, dtype=torch.float64), rtol=1e-6)
    assert torch.allclose(p.epistemic, draws.var(0, correction=0))
    h = HeteroscedasticGaussian().predictive(draws)
    assert torch.allclose(h.aleatoric, (F.softplus(draws[..., 1:]) + 1e-3).square().mean(0))


# -- parameters, dtypes, transforms ----------------------------------------------------------------


def test_learned_noise_is_a_parameter_and_fixed_noise_a_buffer():
    learned, fixed = Gaussian(0.5, learned=True), Gaussian(0.5)
    assert [name for name, _ in learned.named_parameters()] == ["log_noise"]
    assert not list(fixed.parameters())
    assert set(fixed.state_dict()) == set(learned.state_dict()) == {"log_noise"}
    assert fixed.noise.item() == pytest.approx(0.5)
    assert "learned=True" in repr(learned)
    other = Gaussian(2.0)
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(other.noise, fixed.noise)
    assert torch.equal(copy.deepcopy(learned).noise, learned.noise)


def test_learned_noise_finds_the_residual_sd():
    likelihood = Gaussian(learned=True).double()
    outputs, y = torch.zeros(400, 1, dtype=torch.float64), 0.2 * randn(400, 1)
    for _ in range(100):  # gradient descent by hand
        (gradient,) = torch.autograd.grad(likelihood.nll(outputs, y), likelihood.log_noise)
        with torch.no_grad():
            likelihood.log_noise -= 0.3 * gradient
    assert likelihood.noise.item() == pytest.approx(y.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(("likelihood", "shape", "y"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_float32(likelihood, shape, y, dtype):
    outputs = randn(*shape).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    loss = likelihood.nll(outputs, y)
    assert loss.dtype == expected
    assert torch.allclose(loss, likelihood.nll(outputs.to(expected), y))


@pytest.mark.parametrize(("likelihood", "shape", "y"), CASES)
def test_nll_has_a_gradient_and_runs_under_vmap(likelihood, shape, y):
    draws = randn(5, *shape)
    mapped = torch.func.vmap(likelihood.nll, in_dims=(0, None))(draws, y)
    assert torch.allclose(mapped.mean(), likelihood.nll(draws, y))
    gradient = torch.func.grad(likelihood.nll)(draws[0], y)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


# -- shapes: nothing is broadcast ------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
def test_column_outputs_against_flat_targets_is_an_error(likelihood):
    y = torch.ones(6)
    for outputs in (torch.zeros(6, 1), torch.zeros(5, 6, 1)):
        for call in (likelihood.nll, likelihood.log_prob, likelihood.check_target):
            with pytest.raises(
                ValueError, match=r"y of shape \(6, 1\).*y.unsqueeze\(-1\).*outputs.squeeze\(-1\)"
            ):
                call(outputs, y)
    with pytest.raises(ValueError, match=r"pass y.squeeze\(-1\)"):
        likelihood.nll(torch.zeros(6), y.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"need a y of shape \(6, 3\)"):
        likelihood.nll(torch.zeros(6, 3), torch.ones(6, 1))
    with pytest.raises(ValueError, match=r"y.unsqueeze\(0\)"):
        likelihood.nll(torch.zeros(()), torch.ones(()))


def test_heteroscedastic_shapes():
    with pytest.raises(ValueError, match=r"y of shape \(6, 1\).*unsqueeze"):
        HeteroscedasticGaussian().nll(torch.zeros(6, 2), torch.zeros(6))
    with pytest.raises(ValueError, match=r"need a y of shape \(6, 2\)"):
        HeteroscedasticGaussian().nll(torch.zeros(6, 4), torch.zeros(6, 4))
    with pytest.raises(ValueError, match="must be even"):
        HeteroscedasticGaussian().nll(torch.zeros(6, 3), torch.zeros(6, 1))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y", "message"),
    [
        (Categorical(), torch.zeros(6, 4), torch.zeros(6, 1, dtype=torch.long), r"y.squeeze\(-1\)"),
        (Categorical(), torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.long), r"one-hot: .*y.argmax\(-1\)"),
        (Categorical(), torch.zeros(2, 4, 5, 5), torch.zeros(2, 5, 5, dtype=torch.long), "-3 for images"),
        (Categorical(), torch.zeros(6), torch.zeros(6, dtype=torch.long), "not a class axis"),
        (Categorical(dim=-3), torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.long), "not a class axis"),
        (Categorical(), torch.zeros(6, 4), torch.zeros(5, dtype=torch.long), r"need a y of shape \(6,\)"),
        (Gaussian(features=3), torch.zeros(6, 2), torch.zeros(6, 2), "3 features"),
        (Gaussian(features=6), torch.zeros(6), torch.zeros(6), "6 features"),
    ],
)
def test_shapes_that_do_not_belong_together(likelihood, outputs, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.nll(outputs, y)


# -- values that cannot be ----------------------------------------------------------------------------


def test_label_out_of_range_is_named():
    outputs, y = torch.zeros(6, 4), torch.tensor([0, 1, 2, 4, 3, -1])
    with pytest.raises(ValueError, match=r"y\[3\] is 4, but the outputs have 4 classes.*from 0 to 3"):
        Categorical().nll(outputs, y)
    with pytest.raises(ValueError, match=r"y\[1, 2\] is -100"):
        Categorical().check_target(torch.zeros(2, 3, 4), torch.tensor([[0, 0, 0], [0, 0, -100]]))


@pytest.mark.parametrize("bad", [2.0, -0.5, math.nan])
def test_bernoulli_targets_lie_between_zero_and_one(bad):
    with pytest.raises(ValueError, match=r"y\[1\] is .* 0, 1 or a probability"):
        Bernoulli().nll(torch.zeros(3), torch.tensor([0.0, bad, 1.0]))


@pytest.mark.parametrize("likelihood", [Gaussian(), HeteroscedasticGaussian()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gaussian_targets_are_finite(likelihood, bad):
    outputs = torch.zeros(3, 2)
    y = torch.zeros(3, 2 if isinstance(likelihood, Gaussian) else 1)
    y[2, 0] = bad
    with pytest.raises(ValueError, match=r"y\[2, 0\] is (nan|inf)"):
        likelihood.nll(outputs, y)


@pytest.mark.parametrize(("likelihood", "shape", "y"), CASES)
def test_nan_in_the_outputs_never_passes(likelihood, shape, y):
    outputs = randn(*shape)
    outputs.view(-1)[5] = math.nan
    with pytest.raises(ValueError, match=r"outputs holds? 1 NaN, first at index .* diverged"):
        likelihood.nll(outputs, y)
    with pytest.raises(ValueError, match="NaN"):
        likelihood.predictive(outputs.unsqueeze(0))


def test_wrong_types_say_what_to_pass():
    with pytest.raises(TypeError, match=r"y.long\(\)"):
        Categorical().nll(torch.zeros(6, 4), torch.zeros(6))
    with pytest.raises(TypeError, match=r"outputs is a SimpleNamespace.*outputs.logits"):
        Categorical().nll(SimpleNamespace(logits=torch.zeros(6, 4)), labels(6))
    with pytest.raises(TypeError, match="floating point is needed"):
        Gaussian().nll(torch.zeros(6, dtype=torch.long), torch.zeros(6))
    with pytest.raises(TypeError, match="y is a list"):
        Gaussian().nll(torch.zeros(2), [0.0, 1.0])
    with pytest.raises(TypeError, match="real numbers"):
        Gaussian().nll(torch.zeros(2), torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical(dim=1), "counted from the end"),
        (lambda: Gaussian(noise=0.0), "standard deviation: a number above zero"),
        (lambda: Gaussian(noise=math.nan), "above zero"),
        (lambda: Gaussian(features=0), "at least one"),
        (lambda: HeteroscedasticGaussian(floor=-1.0), "above zero"),
        (lambda: Categorical().predictive(torch.zeros(6, 4)), "single draw is draws.unsqueeze"),
    ],
)
def test_arguments_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ("single_label_classification", Categorical),
        ("multi_label_classification", Bernoulli),
        ("regression", Gaussian),
    ],
)
def test_likelihood_of_a_config(problem, kind):
    assert type(likelihood_from_config(SimpleNamespace(problem_type=problem))) is kind
    assert type(likelihood_from_config({"problem_type": problem})) is kind


def test_config_that_states_nothing_or_nonsense():
    for config in (SimpleNamespace(problem_type=None), SimpleNamespace(), {}, None):
        assert likelihood_from_config(config) is None
    with pytest.raises(ValueError, match=r"'ranking'.*single_label_classification"):
        likelihood_from_config({"problem_type": "ranking"})


def test_every_likelihood_is_a_module():
    for likelihood, _, _ in CASES:
        assert isinstance(likelihood, Likelihood)
        assert isinstance(likelihood, nn.Module)
