"""IVON: its posterior where one is known, draws and gradients, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import IVON


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(count: int = 24, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (count,), generator=generator)


def optimizer_of(net: nn.Module, **settings: Any) -> IVON:
    options: dict[str, Any] = {"lr": 0.1, "ess": 24, "betas": (0.9, 0.99), "weight_decay": 1e-2, "seed": 5}
    return IVON(net.parameters(), **(options | settings))


def train(net: nn.Module, optimizer: IVON, steps: int, draws: int = 1) -> None:
    x, y = data(dtype=next(net.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(draws):
            with optimizer.sampled_params():
                F.cross_entropy(net(x), y).backward()
        optimizer.step()


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def states(optimizer: IVON, name: str) -> list[Tensor]:
    return [optimizer.state[p][name] for group in optimizer.param_groups for p in group["params"]]


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


# ------------------------------------------------------------------------------------------ groups, dtypes, paths


def test_settings_of_groups() -> None:
    first, second = nn.Parameter(torch.zeros(50_000)), nn.Parameter(torch.zeros(50_000))
    optimizer = IVON(
        [{"params": [first]}, {"params": [second], "ess": 100.0, "hess_init": 4.0, "weight_decay": 1.0, "lr": 0.0}],
        lr=0.1, ess=10.0, hess_init=0.5, weight_decay=0.5, seed=0,
    )  # fmt: skip
    with optimizer.sampled_params():
        for p, sd in ((first, 10.0**-0.5), (second, 500.0**-0.5)):
            assert abs(float(p.detach().std()) / sd - 1) < 0.02
        (first.sum() + second.sum()).backward()
    optimizer.step()
    assert float(first.detach().abs().min()) > 0
    assert not second.detach().any()  # lr=0


@pytest.mark.parametrize("draws", [1, 2])
def test_foreach_is_the_loop(draws: int) -> None:
    nets = [network(), network()]
    loop, foreach = (
        optimizer_of(n, foreach=f, clip_radius=0.5) for n, f in zip(nets, (False, True), strict=True)
    )
    train(nets[0], loop, 5, draws)
    train(nets[1], foreach, 5, draws)
    for name in ("hessian", "momentum"):
        for a, b in zip(states(loop, name), states(foreach, name), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for a, b in zip(values(nets[0]), values(nets[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_clip_radius_bounds_the_update() -> None:
    w = nn.Parameter(torch.zeros(10))
    optimizer = IVON([w], lr=0.5, ess=10, clip_radius=1e-3, rescale_lr=False, seed=0)
    with optimizer.sampled_params():
        (1e4 * w).sum().backward()
    optimizer.step()
    torch.testing.assert_close(w.detach(), torch.full((10,), -5e-4))


def test_half_precision_keeps_steps_smaller_than_its_rounding() -> None:
    w = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = IVON([w], lr=1e-4, ess=100, rescale_lr=False, betas=(0.0, 0.9999), weight_decay=0.0, seed=0)
    for _ in range(200):
        optimizer.zero_grad()
        with optimizer.sampled_params():
            w.sum().backward()
        optimizer.step()
    state = optimizer.state[w]
    assert {state[name].dtype for name in ("mean", "momentum", "hessian")} == {torch.float32}
    assert abs(float(state["mean"].mean()) - 0.98) < 2e-3  # 200 steps of about 1e-4, each lost in bfloat16
    assert torch.equal(w.detach(), state["mean"].bfloat16())
    with torch.no_grad():
        w.fill_(3.0)  # as loading a checkpoint would
    torch.testing.assert_close(optimizer.posterior_mean(w), torch.full((64,), 3.0))


def test_mixed_dtypes() -> None:
    net = nn.Sequential(nn.Linear(4, 8).bfloat16(), nn.Linear(8, 3).double())
    for foreach in (False, True):
        optimizer = optimizer_of(net, foreach=foreach)
        x, y = data()
        with optimizer.sampled_params():
            F.cross_entropy(net[1](net[0](x.bfloat16()).double()), y).backward()
        optimizer.step()
        assert [p.dtype for p in net.parameters()] == [torch.bfloat16] * 2 + [torch.float64] * 2
        assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("draws", [1, 2])
def test_gradient_scaler(draws: int) -> None:
    x, y = data(dtype=torch.float32)
    nets = [network(dtype=torch.float32), network(dtype=torch.float32)]
    plain, scaled = (optimizer_of(net) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(nets[0], plain, 3, draws)
    for _ in range(3):
        scaled.zero_grad()
        for _ in range(draws):
            with scaled.sampled_params():
                scaler.scale(F.cross_entropy(nets[1](x), y)).backward()
        scaler.step(scaled)
        scaler.update()
    for a, b in zip(
        values(nets[0]) + states(plain, "hessian"), values(nets[1]) + states(scaled, "hessian"), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before = values(nets[1])
    scaled.zero_grad()
    with scaled.sampled_params():
        (scaler.scale(F.cross_entropy(nets[1](x), y)) * 1e38).backward()
    scaler.step(scaled)  # overflow: skipped
    scaler.update()
    assert same(before, values(nets[1]))
    train(nets[1], scaled, 1)


# ------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_resume_is_bit_equal(dtype: torch.dtype) -> None:
    straight, stopped = network(dtype=dtype), network(dtype=dtype)
    whole, first = optimizer_of(straight), optimizer_of(stopped)
    train(straight, whole, 6)
    train(stopped, first, 3)
    saved = copy.deepcopy((stopped.state_dict(), first.state_dict()))
    train(stopped, first, 2)  # what was saved must not move
    again = network(seed=9, dtype=dtype)
    again.load_state_dict(saved[0])
    second = optimizer_of(again, seed=77)
    second.load_state_dict(saved[1])
    train(again, second, 3)
    assert same(values(straight), values(again))
    for name in ("hessian", "momentum"):
        assert same(states(whole, name), states(second, name))


def test_state_survives_a_file_and_a_copy(tmp_path: Any) -> None:
    net = network()
    optimizer = optimizer_of(net)
    train(net, optimizer, 2)
    torch.save((net.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt")
    other = network(3)
    other.load_state_dict(weights)
    resumed = optimizer_of(other)
    resumed.load_state_dict(state)
    both = copy.deepcopy([net, optimizer])
    train(net, optimizer, 2)
    train(other, resumed, 2)
    train(both[0], both[1], 2)
    assert same(values(net), values(other))
    assert same(values(net), values(both[0]))


def test_the_noise_follows_torchs_seed_or_its_own() -> None:
    def draw(**options: Any) -> Tensor:
        w = nn.Parameter(torch.zeros(8))
        optimizer = IVON([w], lr=0.1, ess=10, **options)
        with optimizer.sampled_params(train=False):
            return w.detach().clone()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(first, draw())
    assert not torch.equal(first, second)
    assert torch.equal(draw(seed=3), draw(seed=3))


def test_a_state_of_another_optimizer_is_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="not of an IVON"):
        optimizer_of(net).load_state_dict(torch.optim.Adam(net.parameters()).state_dict())


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0"),
        ({"lr": float("nan")}, "lr"),
        ({"ess": 0}, "ess must be a positive, finite number"),
        ({"hess_init": 0.0}, "hess_init must be a positive"),
        ({"weight_decay": -1e-3}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"betas": 0.9}, "pair"),
        ({"clip_radius": 0.0}, "clip_radius"),
        ({"mc_samples": 0}, "mc_samples"),
        ({"mc_samples": 1.5}, "mc_samples"),
        ({"seed": -1}, "seed"),
        ({"beta1": 0.9}, "no option 'beta1'.*betas="),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer_of(network(), **settings)


def test_bad_groups_are_named() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="mc_samples must be the same"):
        IVON([{"params": [first]}, {"params": [second], "mc_samples": 2}], lr=0.1, ess=1)
    with pytest.raises(TypeError, match="complex64"):
        IVON([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1, ess=1)


@pytest.fixture
def named() -> tuple[nn.Module, IVON]:
    net = network()
    return net, IVON(net.named_parameters(), lr=0.1, ess=24, seed=0)


def test_gradients_that_are_not_finite_are_named(named: tuple[nn.Module, IVON]) -> None:
    net, optimizer = named
    x, y = data()
    before = values(net)
    with optimizer.sampled_params():
        F.cross_entropy(net(x), y).backward()
    bias = dict(net.named_parameters())["2.bias"]
    assert bias.grad is not None
    bias.grad[1] = float("nan")
    with pytest.raises(RuntimeError, match=r"gradient of '2\.bias' is NaN or infinite"):
        optimizer.step()
    assert same(before, values(net))
    assert all(bool(h.isfinite().all()) for h in states(optimizer, "hessian"))
    train(net, optimizer, 1)


def test_curvature_that_overflows_is_named() -> None:
    w = nn.Parameter(torch.zeros(3))
    optimizer = IVON([w], lr=0.1, ess=1e6, betas=(0.9, 0.5), seed=0)
    with optimizer.sampled_params():
        (1e25 * w).sum().backward()
    with pytest.raises(RuntimeError, match="curvature of parameter 0 of group 0"):
        optimizer.step()


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = IVON(embedding.parameters(), lr=0.1, ess=10, seed=0)
    with optimizer.sampled_params():
        embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
