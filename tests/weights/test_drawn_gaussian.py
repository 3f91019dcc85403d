"""Local reparametrisation and flipout: outputs distributed as under drawn weights, example by example."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

import dubito
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight, safe_sqrt, signs

D = torch.float64
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear on a sequence": (lambda: nn.Linear(4, 3), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3, groups=2, dilation=2, padding=1), (4, 7)),
    "conv1d circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, padding="valid"), (2, 5, 4)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, (3, 2), padding="same"), (2, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, (2, 1, 2), padding=1), (2, 2, 2, 2)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 4, 3, stride=2, groups=2, output_padding=1), (4, 3)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, (2, 3), dilation=2), (2, 2, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 2, (1, 2, 2)), (2, 2, 2, 2)),
}


def layer(make: Callable[[], nn.Module], family: dubito.Family) -> dubito.BayesianModule:
    torch.manual_seed(0)
    module = make().to(D)
    torch.manual_seed(1)
    bayes = dubito.bayesianize(module, family)
    with torch.no_grad():
        for posterior in bayes.posteriors():
            for parameter in posterior.spread_parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    return bayes


def moments_by_unit_weights(bayes: dubito.BayesianModule, x: Tensor) -> tuple[Tensor, Tensor]:
    """Exact output mean and variance: y is linear in the weights, so each weight's unit response is enough."""
    names = [n for n, _ in bayes.module.named_parameters()]
    variances = {p.slot.name: p.variance()[p.slot.name].detach() for p in bayes.posteriors()}
    zeros = {n: torch.zeros_like(p) for n, p in bayes.module.named_parameters()}
    with torch.no_grad():
        total = torch.zeros_like(bayes.module(x))
        for name in names:
            for index in range(zeros[name].numel()):
                unit = {n: z.clone() for n, z in zeros.items()}
                unit[name].view(-1)[index] = 1.0
                response = torch.func.functional_call(bayes.module, unit, (x,))
                total += response.square() * variances[name].reshape(-1)[index]
        return bayes.module(x), total


def check_moments(draws: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Mean and variance of draws; standard errors from fourth moments, corrected for the number of entries."""
    count = len(draws)
    limit = float(Normal(0.0, 1.0).icdf(torch.tensor(1 - 1e-4 / (2 * mean.numel()), dtype=D)))
    assert ((draws.mean(0) - mean) / (variance / count).sqrt()).abs().max() < limit
    squares = (draws - mean).square()
    error = ((squares.square().mean(0) - variance.square()).clamp_min(variance.square()) / count).sqrt()
    assert ((squares.mean(0) - variance) / error).abs().max() < limit


@pytest.mark.parametrize("estimator", ["local", "flipout"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_have_the_moments_that_drawn_weights_give(name: str, estimator: Any) -> None:
    make, shape = LAYERS[name]
    bayes = layer(make, dubito.MeanField(scale=0.5, estimator=estimator))
    x = torch.randn(2, *shape, dtype=D, generator=torch.Generator().manual_seed(3))
    mean, variance = moments_by_unit_weights(bayes, x)
    torch.manual_seed(4)
    with torch.no_grad():
        draws = bayes.outputs(x, samples=6000)
    check_moments(draws, mean, variance)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_examples_are_uncorrelated_under_local_and_flipout_alone(estimator: Any) -> None:
    """The same input twice: under one drawn weight the outputs agree, under these the noise does not."""
    x = torch.randn(1, 4, dtype=D).expand(2, 4)

    def correlation(family: dubito.Family) -> float:
        bayes = layer(lambda: nn.Linear(4, 1, bias=False), family)
        torch.manual_seed(2)
        with torch.no_grad():
            draws = bayes.outputs(x, samples=2000).squeeze(-1)
        return float(torch.corrcoef(draws.T)[0, 1])

    assert correlation(dubito.MeanField()) == pytest.approx(1.0)
    assert abs(correlation(dubito.MeanField(estimator=estimator))) < 0.1


def test_t14_t16_local_draws_outputs_and_is_no_function() -> None:
    """Noise enters at the pre-activations: equal inputs in a batch get different outputs, the mean is exact."""
    bayes = layer(lambda: nn.Linear(4, 3), dubito.MeanField(estimator="local"))
    same = torch.ones(2, 4, dtype=D)
    y = bayes(same)
    assert not torch.equal(y[0], y[1])
    deviation = y - bayes.module(same)
    assert deviation.shape == (2, 3)
    # prediction and frozen draws are functions all the same
    frozen = bayes.sample()(same)
    assert torch.equal(frozen[0], frozen[1])
    outputs = bayes.outputs(same, draws=bayes.draw(3))
    torch.testing.assert_close(outputs[:, 0], outputs[:, 1])


@pytest.mark.parametrize("where", ["tied", "reused"])
def test_t16_local_is_refused_where_a_weight_is_used_twice(where: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = nn.Linear(3, 3)
            if where == "tied":
                self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.one(x) if where == "reused" else self.two(x))

    family = dubito.MeanField(estimator="local")
    if where == "tied":
        module = Twice()
        before = [id(p) for p in module.parameters()]
        with pytest.raises(ValueError, match=r"local.*one\.weight.*tied to two\.weight.*weights"):
            dubito.bayesianize(module, family)
        assert [id(p) for p in module.parameters()] == before
        return
    bayes = dubito.bayesianize(Twice(), family)
    with pytest.raises(RuntimeError, match=r"used twice in one call.*estimator=\"weights\""):
        bayes(torch.ones(1, 3))
    assert all(type(p) is nn.Parameter for p in bayes.module.parameters())


def test_t15_tiny_variances_have_no_floor_and_zero_ones_a_finite_gradient() -> None:
    torch.manual_seed(0)
    mean, sd = torch.zeros(1, 4), torch.full((1, 4), 1e-9)
    draws = torch.stack([F.linear(torch.ones(1, 4), LocalWeight.of(mean, sd)) for _ in range(2000)])
    assert float(draws.std()) == pytest.approx(2e-9, rel=0.1)
    x = torch.zeros(2, 4, requires_grad=True)  # the variance of every output is exactly zero
    sd = torch.full((1, 4), 0.1, requires_grad=True)
    F.linear(x, LocalWeight.of(mean, sd)).sum().backward()
    assert x.grad is not None
    assert sd.grad is not None
    assert x.grad.isfinite().all()
    assert sd.grad.isfinite().all()
    variance = torch.tensor([0.0, 1e-30, 4.0], requires_grad=True)
    root = safe_sqrt(variance)
    assert root.tolist() == pytest.approx([0.0, 1e-15, 2.0], abs=1e-18)
    root.sum().backward()
    assert variance.grad is not None
    assert variance.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_t15_squares_do_not_leave_the_range_of_half_precision(dtype: torch.dtype) -> None:
    """x² overflows float16 from 256 on, and a variance of 1e-10 underflows: both are computed in float32."""
    torch.manual_seed(0)
    for size, sd in ((300.0, 0.01), (1.0, 1e-5)):
        x = torch.full((4000, 2), size, dtype=dtype)
        weight = LocalWeight.of(torch.zeros(1, 2, dtype=dtype), torch.full((1, 2), sd, dtype=dtype))
        y = F.linear(x, weight)
        assert y.dtype == dtype
        assert float(y.float().std()) == pytest.approx(size * sd * math.sqrt(2), rel=0.05)


def test_t15_autocast_keeps_the_variance_in_single_precision() -> None:
    bayes = dubito.bayesianize(nn.Linear(2, 1), dubito.MeanField(estimator="local", scale=1e-4))
    x = torch.full((2, 2), 300.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = bayes(x)
        assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in bayes.parameters())
    assert all(p.grad.isfinite().all() for p in bayes.parameters())


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_t30_only_the_deviation_is_perturbed(estimator: Any) -> None:
    """Of weights 1 ± 0.0018 the outputs deviate by 0.0018, not by the weight's own size."""
    module = nn.Linear(1, 1, bias=False).to(D)
    nn.init.ones_(module.weight)
    bayes = dubito.bayesianize(module, dubito.MeanField(scale=0.0018, estimator=estimator))
    torch.manual_seed(0)
    with torch.no_grad():
        y = torch.cat([bayes(torch.ones(50, 1, dtype=D)) for _ in range(200)])
    assert float((y - 1).square().mean().sqrt()) == pytest.approx(0.0018, rel=0.2)


def test_t32_flipout_signs_are_those_of_an_example_and_a_channel() -> None:
    """A constant image through a 1 × 1 kernel: one sign for all pixels keeps their correlation."""
    bayes = layer(lambda: nn.Conv2d(1, 2, 1, bias=False), dubito.MeanField(scale=0.5, estimator="flipout"))
    with torch.no_grad():
        deviation = bayes(torch.ones(64, 1, 3, 3, dtype=D)) - bayes.module(torch.ones(64, 1, 3, 3, dtype=D))
    assert torch.allclose(deviation, deviation[:, :, :1, :1].expand_as(deviation))
    flipped = deviation[:, :, 0, 0].sign()
    assert {*flipped[:, 0].tolist()} == {-1.0, 1.0}, "examples have signs of their own"
    assert {*(flipped[:, 0] * flipped[:, 1]).tolist()} == {-1.0, 1.0}, "and so have channels"
    assert torch.allclose(deviation.abs(), deviation.abs()[:1].expand_as(deviation)), "of one shared draw"


def test_t38_signs_are_fair_and_of_the_right_kind() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        drawn = signs((200, 100), torch.empty(0, dtype=dtype))
        assert drawn.dtype == dtype
        assert {*drawn.unique().tolist()} == {-1.0, 1.0}
        assert abs(float(drawn.double().mean())) < 0.05
    mapped = torch.vmap(lambda x: signs((50,), x), randomness="different")(torch.zeros(3, 1))
    assert mapped.shape == (3, 50)
    assert not torch.equal(mapped[0], mapped[1])


@pytest.mark.parametrize("kind", [LocalWeight, FlipoutWeight])
def test_views_keep_both_parts(kind: Any) -> None:
    mean, other = torch.randn(4, 3), torch.rand(4, 3)
    weight = kind.of(mean, other)
    for view in (weight.T, weight.t(), weight.transpose(0, 1)):
        assert type(view) is kind
        assert torch.equal(view.mean_, mean.T)
    pieces = weight.chunk(2)
    assert [type(p) for p in pieces] == [kind, kind]
    assert torch.equal(pieces[1].mean_, mean[2:])
    assert torch.equal(weight[1:3].mean_, mean[1:3])


def test_gradients_reach_means_and_deviations_as_by_hand() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=D)
    mean, sd = torch.randn(2, 3, dtype=D, requires_grad=True), torch.rand(2, 3, dtype=D, requires_grad=True)
    torch.manual_seed(1)
    y = F.linear(x, LocalWeight.of(mean, sd))
    got = torch.autograd.grad(y.sin().sum(), (mean, sd))
    torch.manual_seed(1)
    by_hand = x @ mean.T + (x.square() @ sd.square().T).sqrt() * torch.randn(5, 2, dtype=D)
    expected = torch.autograd.grad(by_hand.sin().sum(), (mean, sd))
    torch.testing.assert_close(y, by_hand)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    torch.manual_seed(1)
    y = F.linear(x, FlipoutWeight.of(mean, sd))
    got = torch.autograd.grad(y.sin().sum(), (mean, sd))
    torch.manual_seed(1)
    before, after = signs((5, 3), x), signs((5, 2), x)
    by_hand = x @ mean.T + ((x * before) @ sd.T) * after
    expected = torch.autograd.grad(by_hand.sin().sum(), (mean, sd))
    torch.testing.assert_close(y, by_hand)
    torch.testing.assert_close(got[1], expected[1])


# ------------------------------------------------------------------------------------------------ views of a weight


class Viewed(nn.Module):
    """A weight that is used through views of it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: x @ w.view(2, 8)[0, :4] - x @ w[0],
        lambda x, w: (w.t() - w.mT).sum() + 0 * x,
        lambda x, w: w.reshape(-1).sum() - sum(part.sum() for part in w.chunk(2, 1)) + 0 * x,
        lambda x, w: w.t()[1:].sum() - w[:, 1:].sum() + 0 * x,
    ],
)
def test_views_of_a_local_weight_are_views_of_one_draw(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    bayes = dubito.bayesianize(Viewed(use).double(), dubito.MeanField(scale=1.0, estimator="local"))
    with pytest.warns(dubito.DubitoWarning, match="has no rule"):
        output = bayes(torch.ones(2, 4, dtype=D))
    assert output.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("use", "refused"),
    [
        (lambda x, w: F.linear(x, w.t()) - F.linear(x, w.t()), True),
        (lambda x, w: F.linear(x, w.t()) - F.linear(x, w), True),
        (lambda x, w: F.linear(x, w[:3]).sum(-1) - F.linear(x, w[2:]).sum(-1), True),
        (lambda x, w: F.linear(x, w[:2]) - F.linear(x, w[2:]), False),
        (lambda x, w: F.linear(x[:, :2], w[:, :2]) - F.linear(x[:, 2:], w[:, 2:]), False),
        (lambda x, w: sum(F.linear(x, part) for part in w.chunk(4)), False),
    ],
)
def test_entries_of_a_local_weight_are_used_once(
    use: Callable[[Tensor, Tensor], Tensor], refused: bool
) -> None:
    bayes = dubito.bayesianize(Viewed(use), dubito.MeanField(estimator="local"))
    if not refused:
        assert bayes(torch.ones(2, 4)).isfinite().all()
        return
    factors = dubito.LowRankFactors(1, init="svd", estimator="local")
    for network in (bayes, dubito.bayesianize(Viewed(use), factors)):
        with pytest.raises(RuntimeError, match="used twice"):
            network(torch.ones(2, 4))
