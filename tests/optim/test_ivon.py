"""IVON: its posterior where one is known, draws and gradients."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ivon_training import data, network, optimizer_of, same, states, train, values
from torch import Tensor, nn

import dubito
from dubito import IVON

# ------------------------------------------------------------------------------------------ the known posterior


def test_bayesian_linear_regression() -> None:
    """With noise of variance 1 the loss is quadratic: h is the diagonal of xᵀx / n, m the ridge solution.

    A hundred runs at once, as rows of one parameter: the estimates are noisy, their mean must be right. The term that
    keeps h positive adds about (1 - beta2) of it.
    """
    torch.manual_seed(0)
    n, d, delta, runs = 200, 5, 0.05, 100
    x = torch.randn(n, d, dtype=torch.float64) * torch.tensor([0.5, 1.0, 1.5, 2.0, 0.8], dtype=torch.float64)
    y = x @ torch.randn(d, dtype=torch.float64) + torch.randn(n, dtype=torch.float64)
    gram = x.T @ x / n
    exact = torch.linalg.solve(gram + delta * torch.eye(d, dtype=torch.float64), x.T @ y / n)
    w = nn.Parameter(torch.zeros(runs, d, dtype=torch.float64))
    settings: dict[str, Any] = {
        "lr": 0.1,
        "ess": n,
        "weight_decay": delta,
        "rescale_lr": False,
        "hess_init": 0.4,
    }
    optimizer = IVON([w], betas=(0.9, 0.995), seed=0, **settings)
    steps, warm = 1600, 1000
    curvature = torch.zeros_like(w)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps) ** 2
        optimizer.zero_grad()
        with optimizer.sampled_params():
            (0.5 * (y - w @ x.T).square().mean(1)).sum().backward()
        optimizer.step()
        if step >= warm:
            curvature += optimizer.state[w]["hessian"] / (steps - warm)
    torch.testing.assert_close(optimizer.posterior_mean(w).mean(0), exact, atol=2e-3, rtol=0)
    assert float((optimizer.posterior_mean(w) - exact).square().mean().sqrt()) < 5e-3
    torch.testing.assert_close(curvature.mean(0), gram.diagonal(), atol=0, rtol=0.02)
    sd = (n * (gram.diagonal() + delta)).rsqrt()
    torch.testing.assert_close(optimizer.posterior_sd(w).mean(0), sd, atol=0, rtol=0.02)


def test_one_step_by_hand() -> None:
    w = nn.Parameter(torch.tensor([0.5, -2.0], dtype=torch.float64))
    ess, delta, h0, lr = 30.0, 0.1, 0.7, 0.2
    optimizer = IVON([w], lr=lr, ess=ess, hess_init=h0, betas=(0.9, 0.8), weight_decay=delta, seed=3)
    m = w.detach().clone()
    with optimizer.sampled_params():
        theta = w.detach().clone()
        w.pow(4).sum().backward()
    optimizer.step()
    g = 4 * theta**3
    estimate = g * (theta - m) * ess * (h0 + delta)
    h = 0.8 * h0 + 0.2 * estimate + 0.5 * 0.2**2 * (h0 - estimate) ** 2 / (h0 + delta)
    expected = m - lr * (h0 + delta) * (g + delta * m) / (h + delta)
    torch.testing.assert_close(optimizer.state[w]["hessian"], h)
    torch.testing.assert_close(w.detach(), expected)


def test_curvature_stays_above_minus_delta_whatever_it_is_told() -> None:
    w = nn.Parameter(torch.zeros(100, dtype=torch.float64))
    optimizer = IVON([w], lr=1e-4, ess=1.0, hess_init=0.5, betas=(0.0, 0.5), weight_decay=0.01, seed=0)
    for _ in range(30):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            (-50 * w.square()).sum().backward()
        optimizer.step()
        assert bool((optimizer.state[w]["hessian"] + 0.01 > 0).all())


def test_draws_have_the_posteriors_moments() -> None:
    w = nn.Parameter(torch.full((20_000,), 2.0))
    optimizer = IVON([w], lr=0.1, ess=4.0, hess_init=0.9, weight_decay=0.1, seed=0)
    with optimizer.sampled_params(train=False):
        drawn = w.detach().clone()
    assert abs(float(drawn.mean()) - 2.0) < 4 * 0.5 / math.sqrt(20_000)
    assert abs(float(drawn.std()) - 0.5) < 4 * 0.5 / math.sqrt(40_000)
    torch.testing.assert_close(optimizer.posterior_sd(w), torch.full_like(w, 0.5).detach())


# ------------------------------------------------------------------------------------------ blocks and gradients


def test_the_means_come_back_after_an_exception() -> None:
    net = network()
    optimizer = optimizer_of(net)
    before = values(net)

    def fail() -> None:
        with optimizer.sampled_params():
            assert not same(values(net), before)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert same(values(net), before)
    with pytest.raises(RuntimeError, match="without a draw"):
        optimizer.step()
    train(net, optimizer, 1)  # and it goes on


def test_an_exception_keeps_the_earlier_draws() -> None:
    x, y = data()
    results = []
    for fails in (False, True):
        net = network()
        optimizer = optimizer_of(net)
        with optimizer.sampled_params():
            F.cross_entropy(net(x), y).backward()
        if fails:
            with contextlib.suppress(ZeroDivisionError), optimizer.sampled_params():
                F.cross_entropy(net(x), y).backward()
                raise ZeroDivisionError
        optimizer.step()
        results.append(values(net) + states(optimizer, "hessian"))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_what_is_refused_inside_a_block() -> None:
    net = network()
    optimizer = optimizer_of(net)
    extra = nn.Parameter(torch.zeros(2))
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [extra]}),
        lambda: copy.deepcopy(optimizer),
        lambda: optimizer.sampled_params().__enter__(),
        lambda: dubito.from_ivon(net, optimizer),
    ):
        with pytest.raises(RuntimeError, match="inside `with optimizer"), optimizer.sampled_params():
            call()
    assert len(optimizer.param_groups) == 1


def test_accumulation_within_a_block_is_one_batch() -> None:
    x, y = data()
    nets = [network(), network()]
    whole, halves = (optimizer_of(net) for net in nets)
    for _ in range(3):
        whole.zero_grad()
        with whole.sampled_params():
            F.cross_entropy(nets[0](x), y).backward()
        whole.step()
        halves.zero_grad()
        with halves.sampled_params():
            for part in (slice(0, 12), slice(12, 24)):
                (F.cross_entropy(nets[1](x[part]), y[part]) / 2).backward()
        halves.step()
    for a, b in zip(
        values(nets[0]) + states(whole, "hessian"), values(nets[1]) + states(halves, "hessian"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("change", ["clip", "scale back"])
def test_what_is_done_to_the_gradient_is_done_to_the_curvature(draws: int, change: str) -> None:
    x, y = data()
    factor, nets = 0.25 if change == "clip" else 1 / 1024, [network(), network()]
    first, second = (optimizer_of(net) for net in nets)
    scale = 1.0 if change == "clip" else 1024.0
    for _ in range(draws):
        with first.sampled_params():
            (scale * F.cross_entropy(nets[0](x), y)).backward()
        with second.sampled_params():
            (scale * factor * F.cross_entropy(nets[1](x), y)).backward()
    if change == "clip":
        parameters = list(nets[0].parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(parameters, float(norm) * factor)
    else:
        for p in nets[0].parameters():
            assert p.grad is not None
            p.grad.mul_(factor)
    first.step()
    second.step()
    for a, b in zip(
        values(nets[0]) + states(first, "hessian"), values(nets[1]) + states(second, "hessian"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("zero_inside", [False, True])
def test_several_draws_are_averaged(zero_inside: bool) -> None:
    x, y = data()
    net = network()
    optimizer = optimizer_of(net, ess=3.0)
    m = values(net)
    gradients: list[list[Tensor]] = []
    drawn: list[list[Tensor]] = []
    for _ in range(3):
        with optimizer.sampled_params():
            if zero_inside:
                optimizer.zero_grad()
            drawn.append(values(net))
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    for i, p in enumerate(net.parameters()):
        mean = torch.stack([g[i] for g in gradients]).mean(0)
        torch.testing.assert_close(p.grad, mean)
        s = 3.0 * 1.01
        estimates = torch.stack([g[i] * (t[i] - m[i]) * s for g, t in zip(gradients, drawn, strict=True)])
        estimate = estimates.mean(0)
        optimizer.state[p]["expected"] = 0.99 + 0.01 * estimate + 0.5e-4 * (1 - estimate) ** 2 / 1.01
    optimizer.step()
    for p in net.parameters():
        torch.testing.assert_close(optimizer.state[p]["hessian"], optimizer.state[p]["expected"])


def test_only_looking_leaves_gradients_and_the_step_alone() -> None:
    x, y = data()
    net = network()
    optimizer = optimizer_of(net)
    with optimizer.sampled_params():
        F.cross_entropy(net(x), y).backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with torch.no_grad(), optimizer.sampled_params(train=False):
        net(x)
    assert same(gradients, [p.grad for p in net.parameters() if p.grad is not None])
    optimizer.step()


def test_zero_grad_forgets_draws() -> None:
    net = network()
    optimizer = optimizer_of(net)
    with optimizer.sampled_params():
        net(data()[0]).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="without a draw"):
        optimizer.step()


def test_gradients_that_are_none_and_frozen_parameters() -> None:
    net = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2), "frozen": nn.Linear(3, 3)})
    net["frozen"].requires_grad_(False)
    optimizer = IVON(net.parameters(), lr=0.1, ess=24, seed=0)
    x, y = data(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            assert torch.equal(net["frozen"].weight, before["frozen.weight"])
            assert not torch.equal(net["unused"].weight, before["unused.weight"])
            F.cross_entropy(net["frozen"](net["used"](x)), y).backward()
        optimizer.step()
    unused = optimizer.state[net["unused"].weight]
    assert unused["step"] == 0
    assert torch.equal(unused["hessian"], torch.ones(2, 2))
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"used.weight", "used.bias"}


def test_tied_parameters_share_a_draw() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    optimizer = IVON(net.parameters(), lr=0.1, ess=10, seed=0)
    with optimizer.sampled_params():
        assert torch.equal(first.weight, second.weight)
        net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert first.weight is second.weight
    assert len(optimizer.state) == 1


def test_closure() -> None:
    x, y = data()
    nets = [network(), network()]
    loops, closes = (optimizer_of(net, mc_samples=3) for net in nets)
    train(nets[0], loops, 2, draws=3)

    def closure() -> Tensor:
        closes.zero_grad()
        loss = F.cross_entropy(nets[1](x), y)
        loss.backward()
        return loss

    losses = [closes.step(closure) for _ in range(2)]
    assert same(values(nets[0]), values(nets[1]))
    assert not losses[0].requires_grad
    assert losses[0].ndim == 0
