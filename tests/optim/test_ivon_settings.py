"""IVON: settings of groups, precisions and forms of the arithmetic, its state, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ivon_training import data, network, optimizer_of, same, states, train, values
from torch import Tensor, nn

from dubito import IVON

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
