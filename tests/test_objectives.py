from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from dubito.divergences import gaussian_kl
from dubito.objectives import (
    CyclicalKL,
    KLWarmup,
    expected_loss,
    expected_nll,
    minibatch_elbo,
    minibatch_weights,
    negative_elbo,
)

F64 = {"dtype": torch.float64}
N = 60


def scalar(value: float) -> Tensor:
    return torch.tensor(value, **F64)


# ---------------------------------------------------------------- a small model with a known ELBO


class Regression:
    """Bayesian linear regression with unit noise and a mean-field posterior, everything in closed form."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 3, generator=g, **F64)
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5], **F64) + torch.randn(N, generator=g, **F64)
        self.mean = torch.randn(3, generator=g, **F64).requires_grad_()
        self.log_sd = (torch.randn(3, generator=g, **F64) - 2).requires_grad_()

    def nll(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean of E_q -log N(y | x w, 1)."""
        variance = (x.square() * (2 * self.log_sd).exp()).sum(-1)
        return 0.5 * ((x @ self.mean - y).square() + variance + math.log(2 * math.pi)).mean()

    def kl(self) -> Tensor:
        return gaussian_kl(self.mean, self.log_sd)

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(loss, (self.mean, self.log_sd)))

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    def full(self) -> tuple[Tensor, Tensor]:
        loss = negative_elbo(self.nll(self.x, self.y), self.kl(), N).loss
        return loss.detach(), self.gradient(loss)

    def epoch(self, size: int, loss_of: Callable[[int, Tensor, int], Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and gradient of an epoch whose batches are weighted by size."""
        total = scalar(0.0)
        for i, (x, y) in enumerate(self.batches(size)):
            total = total + len(x) / N * loss_of(i, self.nll(x, y), len(x))
        return total.detach(), self.gradient(total)


@pytest.mark.parametrize("size", [60, 20, 7])
def test_epoch_elbo_does_not_depend_on_the_batch_size(size: int) -> None:
    model = Regression()
    loss, gradient = model.epoch(size, lambda i, nll, n: negative_elbo(nll, model.kl(), N).loss)
    expected, expected_gradient = model.full()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("size", [60, 20, 7])
@pytest.mark.parametrize("scheme", ["uniform", "geometric"])
@pytest.mark.parametrize("way", ["sizes to the weights", "size to the loss", "both"])
def test_epoch_elbo_with_minibatch_weights_does_not_depend_on_the_batch_size(
    size: int, scheme: Any, way: str
) -> None:
    model = Regression()
    sizes = [len(x) for x, _ in model.batches(size)]
    m = len(sizes)
    weights = minibatch_weights(m, scheme, None if way == "size to the loss" else sizes)

    def loss_of(i: int, nll: Tensor, n: int) -> Tensor:
        batch_size = None if way == "sizes to the weights" else n
        return minibatch_elbo(nll, model.kl(), N, weights[i], m, batch_size=batch_size).loss

    loss, gradient = model.epoch(size, loss_of)
    expected, expected_gradient = model.full()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_uniform_weights_are_exact_without_being_told_of_the_uneven_batch() -> None:
    model = Regression()
    m = len(model.batches(7))
    weights = minibatch_weights(m)
    loss, gradient = model.epoch(7, lambda i, nll, n: minibatch_elbo(nll, model.kl(), N, weights[i], m).loss)
    torch.testing.assert_close(loss, model.full()[0])
    torch.testing.assert_close(gradient, model.full()[1])


def test_t05_the_kl_is_counted_once_an_epoch() -> None:
    zero, kl = scalar(0.0), scalar(1234.0)
    for sizes in ([60], [20] * 3, [7] * 8 + [4]):
        total = sum((n * negative_elbo(zero, kl, N).loss for n in sizes), zero)
        assert total.item() == pytest.approx(1234.0)


def test_t07_the_loss_is_an_upper_bound_of_minus_the_evidence_and_is_attained() -> None:
    model = Regression()
    covariance = torch.eye(N, **F64) + model.x @ model.x.mT
    evidence = MultivariateNormal(torch.zeros(N, **F64), covariance).log_prob(model.y)
    assert N * model.full()[0].item() > -evidence.item()

    precision = torch.eye(3, **F64) + model.x.mT @ model.x
    posterior = MultivariateNormal(
        torch.linalg.solve(precision, model.x.mT @ model.y), precision_matrix=precision
    )
    quadratic = (model.x @ posterior.mean - model.y).square()
    spread = ((model.x @ posterior.covariance_matrix) * model.x).sum(-1)
    nll = 0.5 * (quadratic + spread + math.log(2 * math.pi)).mean()
    prior = MultivariateNormal(torch.zeros(3, **F64), torch.eye(3, **F64))
    elbo = negative_elbo(nll, torch.distributions.kl_divergence(posterior, prior), N)
    assert N * elbo.loss.item() == pytest.approx(-evidence.item(), rel=1e-10)


def test_minimising_the_loss_recovers_the_mean_field_posterior() -> None:
    model = Regression()
    optimizer = torch.optim.LBFGS(
        [model.mean, model.log_sd], max_iter=200, tolerance_grad=1e-12, tolerance_change=0
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = negative_elbo(model.nll(model.x, model.y), model.kl(), N).loss
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    precision = torch.eye(3, **F64) + model.x.mT @ model.x
    torch.testing.assert_close(
        model.mean.detach(), torch.linalg.solve(precision, model.x.mT @ model.y), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close((2 * model.log_sd.detach()).exp(), 1 / precision.diagonal(), rtol=1e-6, atol=0)


# ---------------------------------------------------------------- negative_elbo


def test_negative_elbo_parts() -> None:
    elbo = negative_elbo(scalar(2.0), scalar(300.0), 100, beta=0.5)
    assert elbo.loss.item() == 3.5
    assert (elbo.nll.item(), elbo.kl.item(), elbo.kl_per_datum.item(), elbo.beta) == (2.0, 300.0, 3.0, 0.5)


def test_t13_kl_per_datum_is_reported_whatever_beta() -> None:
    """The number that shows a prior too wide for the width: nats of KL per datum beside the NLL."""
    weights = 268_800
    kl = gaussian_kl(torch.zeros(weights), torch.full((weights,), -3.0))
    elbo = negative_elbo(torch.tensor(math.log(10.0)), kl, 60_000, beta=0.0)
    assert elbo.kl_per_datum.item() == pytest.approx(weights * 2.50124 / 60_000, rel=1e-4)
    assert elbo.kl_per_datum > elbo.nll
    assert elbo.loss == elbo.nll


@settings(deadline=None, max_examples=20)
@given(beta=st.floats(0, 2), temperature=st.floats(0.01, 2))
def test_loss_is_always_nll_plus_beta_times_kl_per_datum(beta: float, temperature: float) -> None:
    elbo = negative_elbo(scalar(1.0), scalar(50.0), 10, beta=beta, temperature=temperature)
    assert elbo.beta == pytest.approx(beta * temperature)
    assert elbo.loss.item() == pytest.approx(1.0 + beta * temperature * 5.0)


def test_temperature_gives_the_posterior_it_documents() -> None:
    """Conjugate: the minimiser at T has precision 1/s² + N/T; with prior sd s sqrt(T), that of exp(-U/T)."""
    temperature, s, y = 0.25, 0.8, torch.tensor([0.3, 1.0, 0.7, -0.2], **F64)
    for prior_sd, cold in ((s, False), (s * temperature**0.5, True)):
        mean, log_sd = torch.zeros(1, **F64).requires_grad_(), torch.zeros(1, **F64).requires_grad_()
        optimizer = torch.optim.LBFGS([mean, log_sd], max_iter=100, tolerance_grad=1e-12, tolerance_change=0)

        def closure(
            mean: Tensor = mean,
            log_sd: Tensor = log_sd,
            optimizer: Any = optimizer,
            prior_sd: float = prior_sd,
        ) -> Tensor:
            optimizer.zero_grad()
            nll = 0.5 * ((y - mean).square() + (2 * log_sd).exp()).mean()
            loss = negative_elbo(
                nll, gaussian_kl(mean, log_sd, 0.0, prior_sd), 4, temperature=temperature
            ).loss
            loss.backward()
            return loss

        optimizer.step(closure)
        precision = (1 / s**2 + 4) / temperature if cold else 1 / s**2 + 4 / temperature
        assert (-2 * log_sd).exp().item() == pytest.approx(precision, rel=1e-6)
        assert mean.item() == pytest.approx(y.sum().item() / temperature / precision, rel=1e-6)


def test_kl_may_be_a_number_and_gradients_flow_to_both_parts() -> None:
    nll, kl = scalar(1.0).requires_grad_(), scalar(10.0).requires_grad_()
    negative_elbo(nll, kl, 5, beta=0.5).loss.backward()
    assert nll.grad is not None
    assert kl.grad is not None
    assert (nll.grad.item(), kl.grad.item()) == (1.0, pytest.approx(0.1))
    assert negative_elbo(nll, 0.0, 5).loss.item() == 1.0


@pytest.mark.parametrize("n_data", [0, -3])
def test_n_data_below_one(n_data: int) -> None:
    with pytest.raises(ValueError, match="n_data must be at least 1"):
        negative_elbo(scalar(1.0), scalar(1.0), n_data)


@pytest.mark.parametrize("n_data", [None, 60_000.0, "60000", True])
def test_n_data_that_is_no_whole_number(n_data: Any) -> None:
    with pytest.raises(TypeError, match=r"len\(train_set\)"):
        negative_elbo(scalar(1.0), scalar(1.0), n_data)


def test_n_data_cannot_be_left_out() -> None:
    with pytest.raises(TypeError, match="n_data"):
        negative_elbo(scalar(1.0), scalar(1.0))  # type: ignore[call-arg]


@pytest.mark.parametrize("beta", [-0.1, float("nan"), float("inf")])
def test_beta_that_is_none(beta: float) -> None:
    with pytest.raises(ValueError, match="beta must be a finite number of at least 0"):
        negative_elbo(scalar(1.0), scalar(1.0), 5, beta=beta)
    with pytest.raises(ValueError, match="temperature must be a positive"):
        negative_elbo(scalar(1.0), scalar(1.0), 5, temperature=beta)


def test_terms_that_are_not_scalars() -> None:
    with pytest.raises(ValueError, match="take the mean over the batch"):
        negative_elbo(torch.ones(8), scalar(1.0), 5)
    with pytest.raises(ValueError, match="take the sum over the weights"):
        negative_elbo(scalar(1.0), torch.ones(8), 5)
    with pytest.raises(TypeError, match="nll_mean must be a tensor"):
        negative_elbo(1.0, scalar(1.0), 5)  # type: ignore[arg-type]


def test_nan_never_passes() -> None:
    nan = float("nan")
    with pytest.raises(ValueError, match="nll_mean is nan"):
        negative_elbo(scalar(nan), scalar(1.0), 5)
    with pytest.raises(ValueError, match="kl is nan"):
        negative_elbo(scalar(1.0), scalar(nan), 5)
    with pytest.raises(ValueError, match="kl is inf"):
        negative_elbo(scalar(1.0), scalar(math.inf), 5, beta=0.0)
    with pytest.raises(ValueError, match="losses contain nan"):
        expected_loss(torch.tensor([1.0, nan]))
    assert negative_elbo(scalar(nan), scalar(1.0), 5, check=False).loss.isnan()


def test_objective_works_under_vmap_and_grad() -> None:
    losses = torch.vmap(lambda nll, kl: negative_elbo(nll, kl, 10).loss)(torch.ones(3), torch.arange(3.0))
    torch.testing.assert_close(losses, torch.tensor([1.0, 1.1, 1.2]))
    gradient = torch.func.grad(lambda kl: negative_elbo(torch.ones(()), kl, 10).loss)(torch.tensor(2.0))
    assert gradient.item() == pytest.approx(0.1)


# ---------------------------------------------------------------- minibatch weights


@pytest.mark.parametrize("m", [1, 2, 3, 469, 1100, 5000])
@pytest.mark.parametrize("scheme", ["uniform", "geometric"])
def test_minibatch_weights_sum_to_one_for_any_number(m: int, scheme: Any) -> None:
    for sizes in (None, [128] * (m - 1) + [96]):
        weights = minibatch_weights(m, scheme, sizes)
        assert weights.dtype == torch.float64
        assert weights.shape == (m,)
        assert weights.isfinite().all()
        assert (weights >= 0).all()
        assert weights.sum().item() == pytest.approx(1.0, abs=1e-12)
        assert minibatch_weights(m, scheme)[0] > 0


@pytest.mark.parametrize("m", [1, 2, 7, 50])
def test_geometric_weights_are_those_of_the_paper(m: int) -> None:
    exact = [2 ** (m - i) / (2**m - 1) for i in range(1, m + 1)]  # whole numbers until the division
    torch.testing.assert_close(
        minibatch_weights(m, "geometric"), torch.tensor(exact, **F64), rtol=1e-14, atol=0
    )


def test_an_odd_last_batch_has_its_share_of_geometric_weights() -> None:
    weights = minibatch_weights(4, "geometric", [10, 10, 10, 4])
    torch.testing.assert_close(weights, torch.tensor([4 / 7 * 0.75, 2 / 7 * 0.75, 1 / 7 * 0.75, 0.25], **F64))
    torch.testing.assert_close(minibatch_weights(4, "geometric", [5] * 4), minibatch_weights(4, "geometric"))


def test_minibatch_weights_are_checked() -> None:
    with pytest.raises(ValueError, match="n_batches must be at least 1"):
        minibatch_weights(0)
    with pytest.raises(TypeError, match=r"len\(loader\)"):
        minibatch_weights(2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'uniform', 'geometric'"):
        minibatch_weights(2, "linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_batches = 2 sizes, got 3"):
        minibatch_weights(2, batch_sizes=[1, 2, 3])
    with pytest.raises(ValueError, match="batch_sizes must be at least 1"):
        minibatch_weights(2, batch_sizes=[1, 0])


def test_minibatch_elbo_is_the_formula_and_reports_the_weight_it_used() -> None:
    elbo = minibatch_elbo(scalar(1.0), scalar(60.0), 30, 0.5, 4, beta=0.5)
    assert elbo.loss.item() == pytest.approx(1.0 + 0.5 * 0.5 * 4 * 60 / 30)
    assert elbo.beta == 1.0
    assert elbo.kl_per_datum.item() == 2.0
    by_size = minibatch_elbo(scalar(1.0), scalar(60.0), 30, 0.5, 4, batch_size=6)
    assert by_size.loss.item() == pytest.approx(1.0 + 0.5 * 60 / 6)
    assert (
        minibatch_elbo(torch.ones(()), torch.ones(()), 3, minibatch_weights(2)[0], 2).loss.dtype
        == torch.float32
    )


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_minibatch_weight_outside_its_range(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        minibatch_elbo(scalar(1.0), scalar(1.0), 10, weight, 2)
    with pytest.raises(ValueError, match="larger than n_data"):
        minibatch_elbo(scalar(1.0), scalar(1.0), 10, 0.5, 2, batch_size=11)


# ---------------------------------------------------------------- schedules


def test_warmup_linear() -> None:
    beta = KLWarmup(4, delay=2)
    assert [beta(s) for s in range(9)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    falling = KLWarmup(2, start=1.0, end=0.1)
    assert [falling(s) for s in range(4)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [KLWarmup(0, delay=1)(s) for s in range(3)] == [0, 1, 1]


def test_warmup_cosine() -> None:
    beta = KLWarmup(4, end=2.0, schedule="cosine")
    assert [beta(s) for s in range(6)] == pytest.approx(
        [2 * (1 - math.cos(math.pi * s / 4)) / 2 for s in range(4)] + [2, 2]
    )


def test_cyclical() -> None:
    beta = CyclicalKL(4, ramp=0.5)
    assert [beta(s) for s in range(9)] == [0, 0.5, 1, 1, 0, 0.5, 1, 1, 0]


def test_schedules_refuse_what_makes_no_sense() -> None:
    for make in (
        lambda: KLWarmup(-1),
        lambda: KLWarmup(2, start=-0.5),
        lambda: KLWarmup(2, end=float("nan")),
        lambda: KLWarmup(2, delay=-1),
        lambda: KLWarmup(2, schedule="exponential"),  # type: ignore[arg-type]
        lambda: KLWarmup(2)(-1),
        lambda: CyclicalKL(0),
        lambda: CyclicalKL(2, ramp=0.0),
        lambda: CyclicalKL(2, ramp=1.5),
        lambda: CyclicalKL(2, schedule="sine"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"must be|fraction|unknown schedule"):
            make()
    with pytest.raises(TypeError, match="steps must be a whole number"):
        KLWarmup(1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- expected loss


def test_t06_expected_loss_is_the_mean_over_draws_in_value_and_gradient() -> None:
    weight = scalar(2.0).requires_grad_()
    for draws in (1, 4, 64):
        loss = expected_loss(weight.expand(draws, 3) ** 2)
        (gradient,) = torch.autograd.grad(loss, weight)
        assert (loss.item(), gradient.item()) == (4.0, 4.0)


def test_expected_loss_needs_draws() -> None:
    for wrong in (scalar(1.0), torch.zeros(0, 3)):
        with pytest.raises(ValueError, match="leading dimension of draws"):
            expected_loss(wrong)


class LinearGaussian:
    """The least that looks like a BayesianModule: outputs x·w with w ~ N(1, 1), unit-noise likelihood."""

    def draw(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        return 1.0 + torch.randn(samples, generator=generator, **F64)

    def outputs(self, x: Tensor, *, samples: int | None = None, draws: Tensor | None = None) -> Tensor:
        weights = self.draw(samples or 1) if draws is None else draws
        return weights[:, None] * x

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return -Normal(outputs, 1.0).log_prob(y).mean()


def test_t06_expected_nll_is_the_mean_over_draws_and_converges_to_the_closed_form() -> None:
    x, y = torch.tensor([1.0, 2.0], **F64), torch.tensor([0.5, 3.0], **F64)
    exact = 0.5 * ((x - y).square() + x.square() + math.log(2 * math.pi)).mean().item()
    generator = torch.Generator().manual_seed(0)
    estimate = expected_nll(LinearGaussian(), x, y, samples=100_000, generator=generator)
    assert estimate.item() == pytest.approx(exact, abs=0.05)
    one, two = (
        expected_nll(LinearGaussian(), x, y, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(one, two)
    torch.manual_seed(1)
    assert torch.equal(one, expected_nll(LinearGaussian(), x, y, 3))
    with pytest.raises(ValueError, match="samples must be at least 1"):
        expected_nll(LinearGaussian(), x, y, samples=0)
