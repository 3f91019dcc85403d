"""From the moments of the outputs to the predictive, against quadrature and Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

import dubito
from dubito.moments.head import (
    HEADS,
    LowRankLogits,
    pairwise_probabilities,
    predictive_from_moments,
    probit_probabilities,
    sampled_probabilities,
    second_order_probabilities,
)
from dubito.moments.sampled_logits import fixed_normals, sampled_logits
from dubito.predictive import NotAvailableError


def logits(classes: int, sd: float, batch: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    mean = 2 * torch.randn(batch, classes, dtype=torch.float64, generator=generator)
    return mean, (sd * (0.5 + torch.rand(batch, classes, dtype=torch.float64, generator=generator))).square()


def monte_carlo(mean: Tensor, root: Tensor, samples: int = 20_000) -> Tensor:
    """Softmax averaged over pseudo-random draws; `root` the square root of the covariance, (batch, C, C)."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros_like(mean)
    for _ in range(samples // 500):
        z = torch.randn(500, *mean.shape, dtype=mean.dtype, generator=generator)
        total += (mean + torch.einsum("bij,sbj->sbi", root, z)).softmax(-1).mean(0)
    return total / (samples // 500)


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p.log() - q.log())).sum(-1).mean())


def expectation(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    points, weights = (torch.as_tensor(part) for part in hermegauss(120))
    values = function(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * points)
    return (values * weights).sum(-1) / weights.sum()


# ------------------------------------------------------------------------------------------ the four forms


@pytest.mark.parametrize(
    ("classes", "sd", "bounds"),
    [  # KL to the truth of sampled, probit, pairwise, second order: measured, times about two
        (2, 1.0, (2e-5, 6e-3, 5e-4, 4e-3)),
        (10, 0.3, (2e-5, 8e-4, 2e-4, 2e-5)),
        (10, 1.0, (1e-4, 4e-2, 1e-2, 3e-3)),
        (100, 1.0, (1e-3, 2e-1, 8e-2, 3e-3)),
    ],
)
def test_probabilities_are_near_the_truth(
    classes: int, sd: float, bounds: tuple[float, float, float, float]
) -> None:
    mean, variance = logits(classes, sd, batch=60 if classes < 100 else 20)
    truth = monte_carlo(mean, torch.diag_embed(variance.sqrt()), 20_000 if classes < 100 else 5_000)
    forms = (
        sampled_probabilities,
        probit_probabilities,
        pairwise_probabilities,
        second_order_probabilities,
    )
    for form, bound in zip(forms, bounds, strict=True):
        found = form(mean, variance)
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[:, 0]))
        assert kl(truth, found) < bound, form.__name__
    assert kl(truth, sampled_probabilities(mean, variance)) < 0.1 * kl(truth, mean.softmax(-1))


@pytest.mark.parametrize(
    ("form", "share"),  # of the error that is left where the covariance is known
    [(sampled_probabilities, 0.05), (pairwise_probabilities, 0.8), (second_order_probabilities, 0.2)],
)
def test_correlated_logits(form: Callable[..., Tensor], share: float) -> None:
    mean, variance = logits(5, 0.5)
    generator = torch.Generator().manual_seed(3)
    factor = 0.4 * torch.randn(60, 5, 2, dtype=torch.float64, generator=generator)
    low_rank = LowRankLogits(factor, 0.2 * variance)
    full = factor @ factor.mT + torch.diag_embed(0.2 * variance)
    truth = monte_carlo(mean, torch.linalg.cholesky(full))
    diagonal = full.diagonal(dim1=-2, dim2=-1)
    assert kl(truth, form(mean, diagonal, full)) < share * kl(truth, form(mean, diagonal))
    tolerance = 2e-2 if form is sampled_probabilities else 1e-10  # other numbers, not another law
    torch.testing.assert_close(
        form(mean, diagonal, low_rank), form(mean, diagonal, full), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("form", [pairwise_probabilities, second_order_probabilities])
def test_a_diagonal_covariance_is_no_covariance(form: Callable[..., Tensor]) -> None:
    mean = torch.randn(6, 4, dtype=torch.float64)
    variance = torch.full_like(mean, 0.3)
    torch.testing.assert_close(form(mean, variance, torch.diag_embed(variance)), form(mean, variance))


@pytest.mark.parametrize("head", HEADS)
def test_no_variance_is_the_softmax(head: str) -> None:
    mean = torch.randn(6, 4)
    found = predictive_from_moments(dubito.Categorical(), mean, torch.zeros_like(mean), head=head)
    torch.testing.assert_close(found.probs, mean.softmax(-1))


def test_a_noise_common_to_all_classes_changes_nothing() -> None:
    mean = torch.randn(6, 4, dtype=torch.float64)
    common = LowRankLogits(torch.full((6, 4, 1), 3.0, dtype=torch.float64), torch.zeros_like(mean))
    variance = torch.full_like(mean, 9.0)
    for form in (sampled_probabilities, pairwise_probabilities, second_order_probabilities):
        torch.testing.assert_close(form(mean, variance, common), mean.softmax(-1), atol=1e-6, rtol=0)
    singular = torch.full((6, 4, 4), 9.0, dtype=torch.float64)
    torch.testing.assert_close(
        sampled_probabilities(mean, variance, singular), mean.softmax(-1), atol=1e-6, rtol=0
    )


# ------------------------------------------------------------------------------------------ fixed numbers


@pytest.mark.parametrize(("samples", "dimensions"), [(256, 10), (7, 3), (64, 30_000)])
def test_fixed_normals(samples: int, dimensions: int) -> None:
    like = torch.zeros((), dtype=torch.float64)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    z = fixed_normals(samples, dimensions, like)
    assert torch.equal(before, torch.get_rng_state())
    assert z.shape == (samples, dimensions)
    torch.testing.assert_close(z.mean(0), torch.zeros(dimensions, dtype=torch.float64))
    torch.testing.assert_close(z.square().mean(0), torch.ones(dimensions, dtype=torch.float64))
    assert torch.equal(z, fixed_normals(samples, dimensions, like))


def test_sampled_logits_have_the_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)
    full = root @ root.mT
    mean = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    draws = sampled_logits(mean, full.diagonal(dim1=-2, dim2=-1), full, samples=4096)
    torch.testing.assert_close(draws.mean(0), mean)
    for b in range(2):
        torch.testing.assert_close(draws[:, b].T.cov(), full[b], rtol=0, atol=0.05 * float(full[b].max()))


# ------------------------------------------------------------------------------------------ predictives


def test_categorical_predictive() -> None:
    mean, variance = logits(5, 1.0)
    found = predictive_from_moments(dubito.Categorical(), mean, variance)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(20_000, *mean.shape, dtype=torch.float64, generator=generator)
    probs = (mean + variance.sqrt() * z).softmax(-1)
    torch.testing.assert_close(found.probs, probs.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(found.epistemic, probs.var(0), atol=0.01, rtol=0)
    expected = torch.special.entr(probs).sum(-1).mean(0)
    torch.testing.assert_close(found.expected_entropy, expected, atol=0.02, rtol=0)
    assert float(found.mutual_information.min()) > 0
    assert torch.equal(found.logits_mean, mean)
    assert torch.equal(found.logits_variance, variance)
    assert found.samples is None
    assert found.draws is None
    assert found.log_prob(torch.zeros(60, dtype=torch.long)).shape == (60,)
    second = predictive_from_moments(dubito.Categorical(), mean, 0.04 * variance, head="second_order")
    sharp = predictive_from_moments(dubito.Categorical(), mean, 0.04 * variance)
    torch.testing.assert_close(second.mutual_information, sharp.mutual_information, atol=1e-3, rtol=0.05)
    torch.testing.assert_close(second.epistemic, sharp.epistemic, atol=1e-3, rtol=0.05)
    for head in ("probit", "pairwise"):
        plain = predictive_from_moments(dubito.Categorical(), mean, variance, head=head)
        assert plain.entropy.shape == (60,)
        with pytest.raises(NotAvailableError, match="expected_entropy"):
            _ = plain.mutual_information


def test_blocks_of_the_batch_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, variance = logits(4, 1.0)
    covariance = torch.diag_embed(variance)
    whole = predictive_from_moments(dubito.Categorical(), mean, variance, covariance)
    monkeypatch.setattr("dubito.moments.head._BLOCK", 256 * 4 * 7)
    parts = predictive_from_moments(dubito.Categorical(), mean, variance, covariance)
    torch.testing.assert_close(parts.probs, whole.probs)
    torch.testing.assert_close(parts.mutual_information, whole.mutual_information)
    assert len(parts) == 60


@pytest.mark.parametrize("head", HEADS)
def test_another_class_axis(head: str) -> None:
    mean, variance = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    image = predictive_from_moments(dubito.Categorical(dim=-3), mean, variance, head=head)
    flat = predictive_from_moments(
        dubito.Categorical(),
        mean.movedim(1, -1).reshape(-1, 3),
        variance.movedim(1, -1).reshape(-1, 3),
        head=head,
    )
    torch.testing.assert_close(image.probs.movedim(1, -1).reshape(-1, 3), flat.probs)
    assert image.prediction.shape == (2, 4, 5)


@pytest.mark.parametrize("sd", [0.1, 1.0, 3.0])
def test_bernoulli_predictive(sd: float) -> None:
    mean = torch.linspace(-6, 6, 25, dtype=torch.float64)
    variance = torch.full_like(mean, sd**2)
    found = predictive_from_moments(dubito.Bernoulli(), mean, variance)
    exact = expectation(torch.sigmoid, mean, variance)
    torch.testing.assert_close(found.probs, exact, atol=5e-5, rtol=0)
    second = expectation(lambda x: x.sigmoid().square(), mean, variance) - exact.square()
    torch.testing.assert_close(found.epistemic, second, atol=1e-3, rtol=0.01)
    entropy = expectation(
        lambda x: torch.special.entr(x.sigmoid()) + torch.special.entr((-x).sigmoid()), mean, variance
    )
    torch.testing.assert_close(found.expected_entropy, entropy, atol=1e-3, rtol=0)
    probit = predictive_from_moments(dubito.Bernoulli(), mean, variance, head="probit")
    torch.testing.assert_close(probit.probs, exact, atol=0.02, rtol=0)
    if sd == 0.1:
        taylor = predictive_from_moments(dubito.Bernoulli(), mean, variance, head="second_order")
        torch.testing.assert_close(taylor.probs, exact, atol=1e-5, rtol=0)
        torch.testing.assert_close(taylor.epistemic, second, atol=1e-5, rtol=0)


def test_gaussian_predictive_is_exact() -> None:
    mean, variance = torch.randn(8, 2), torch.rand(8, 2)
    found = predictive_from_moments(dubito.Gaussian(noise=0.5), mean, variance)
    assert torch.equal(found.mean, mean)
    torch.testing.assert_close(found.epistemic, variance)
    torch.testing.assert_close(found.aleatoric, torch.full_like(mean, 0.25))
    y = torch.randn(8, 2)
    exact = torch.distributions.Normal(mean, (variance + 0.25).sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(found.log_prob(y), exact)


def test_heteroscedastic_predictive() -> None:
    likelihood = dubito.HeteroscedasticGaussian(floor=0.05)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    variance = torch.rand(10, 4, generator=generator, dtype=torch.float64)
    found = predictive_from_moments(likelihood, mean, variance)
    assert torch.equal(found.mean, mean[:, :2])
    assert torch.equal(found.epistemic, variance[:, :2])

    def noise(x: Tensor) -> Tensor:
        return F.softplus(x) + 0.05

    raw, wide = mean[:, 2:], variance[:, 2:]
    torch.testing.assert_close(found.aleatoric, expectation(lambda x: noise(x).square(), raw, wide))
    entropy = expectation(lambda x: noise(x).log(), raw, wide) + 0.5 * math.log(2 * math.pi * math.e)
    torch.testing.assert_close(found.expected_entropy, entropy, atol=1e-8, rtol=0)
    assert float(found.mutual_information.min()) > 0


def test_a_likelihood_of_ones_own_is_sampled() -> None:
    class Mine(dubito.Categorical):
        pass

    class Other(dubito.Likelihood):
        def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
            return outputs.sum(-1)

        def predictive(
            self, outputs: Tensor, keep_draws: bool = True, consistent: bool = True
        ) -> dubito.Predictive:
            return dubito.Predictive.from_draws("bernoulli", outputs, logits=True, keep_draws=keep_draws)

        def check_target(self, outputs: Tensor, y: Tensor) -> None:
            pass

    mean, variance = torch.randn(5, 3), torch.rand(5, 3)
    assert predictive_from_moments(Mine(), mean, variance).kind == "categorical"
    sampled = predictive_from_moments(Other(), mean, variance)
    exact = predictive_from_moments(dubito.Bernoulli(), mean, variance)
    torch.testing.assert_close(sampled.probs, exact.probs, atol=5e-3, rtol=0)
    with pytest.raises(ValueError, match="Other"):
        predictive_from_moments(Other(), mean, variance, head="probit")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("likelihood", [dubito.Categorical(), dubito.Bernoulli()])
def test_gradient_passes(head: str, likelihood: dubito.Likelihood) -> None:
    mean = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    variance = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)

    def probs(m: Tensor, v: Tensor) -> Tensor:
        return predictive_from_moments(likelihood, m, v, head=head, samples=8).probs

    assert torch.autograd.gradcheck(probs, (mean, variance))


@pytest.mark.parametrize("likelihood", [dubito.Categorical(), dubito.Bernoulli()])
def test_gradient_is_finite_without_variance(likelihood: dubito.Likelihood) -> None:
    mean = torch.randn(4, 3, requires_grad=True)
    variance = torch.zeros(4, 3, requires_grad=True)
    found = predictive_from_moments(likelihood, mean, variance)
    (found.entropy.sum() + found.probs.square().sum()).backward()
    assert mean.grad is not None
    assert variance.grad is not None
    assert bool(mean.grad.isfinite().all())
    assert bool(variance.grad.isfinite().all())


# ------------------------------------------------------------------------------------------ what is refused


def test_what_is_refused() -> None:
    mean, variance = torch.randn(4, 3), torch.rand(4, 3)
    negative = variance.clone()
    negative[1, 2] = -1.0
    full = torch.eye(3).expand(4, 3, 3).clone()
    full[2, 0, 0] = -1.0
    categorical = dubito.Categorical()
    cases = [
        (lambda: predictive_from_moments(categorical, mean, variance, head="laplace"), "unknown head"),
        (lambda: predictive_from_moments(categorical, mean, variance[:2]), "must be equal"),
        (lambda: predictive_from_moments(categorical, mean, negative), "1 negative, NaN or infinite of 12"),
        (lambda: predictive_from_moments(categorical, mean * float("nan"), variance), "12 NaN"),
        (lambda: predictive_from_moments(categorical, mean, variance, full), "not positive semidefinite"),
        (lambda: predictive_from_moments(categorical, mean, variance, full[:, :2]), "covariance has shape"),
        (
            lambda: predictive_from_moments(
                categorical, mean, variance, LowRankLogits(torch.zeros(4, 2, 1), variance)
            ),
            "factor",
        ),
        (
            lambda: predictive_from_moments(categorical, mean, variance, samples=1),
            "samples must be at least 2",
        ),
        (lambda: predictive_from_moments(dubito.Categorical, mean, variance), "must be a Likelihood"),  # type: ignore[arg-type]
        (lambda: predictive_from_moments(dubito.HeteroscedasticGaussian(), mean, variance), "even"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
