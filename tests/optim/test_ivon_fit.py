"""`dubito.fit` under IVON: every step under a draw, and everything else as with any optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import IVON, fit


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(size: int = 8, count: int = 24) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (count,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def ivon(groups: Any, **settings: Any) -> IVON:
    options: dict[str, Any] = {"lr": 0.1, "ess": 24, "betas": (0.9, 0.95), "weight_decay": 0.02, "seed": 3}
    return IVON(groups, **(options | settings))


def weights(net: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


@pytest.mark.parametrize("draws", [1, 2])
def test_fit_is_the_plain_loop(draws: int) -> None:
    net = network()
    optimizer = ivon(net.parameters(), mc_samples=draws)
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            for _ in range(draws):
                with optimizer.sampled_params():
                    F.cross_entropy(net(x), y).backward()
            optimizer.step()
    made: list[IVON] = []

    def make(groups: Any) -> IVON:
        made.append(ivon(groups, mc_samples=draws))
        return made[0]

    fitted = network()
    fit(fitted, batches(), likelihood=dubito.Categorical(), optimizer=make, epochs=2, progress=False)
    torch.testing.assert_close(weights(fitted), weights(net))
    assert made[0].param_groups[0]["weight_decay"] == 0.02
    bayes = dubito.from_ivon(fitted, made[0], likelihood=dubito.Categorical())
    assert bayes.predict(torch.randn(2, 4).double(), samples=3).probs.shape == (2, 3)


def test_accumulation_is_a_larger_batch() -> None:
    nets = [network(), network()]
    settings: dict[str, Any] = {"loss": F.cross_entropy, "epochs": 2, "progress": False}
    fit(nets[0], batches(8), optimizer=ivon(nets[0].parameters()), **settings)
    fit(nets[1], batches(4), optimizer=ivon(nets[1].parameters()), accumulation=2, **settings)
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]), rtol=1e-10, atol=1e-12)


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    whole = network()
    settings: dict[str, Any] = {"likelihood": dubito.Categorical(), "optimizer": ivon, "progress": False}
    fit(whole, batches(), epochs=4, **settings)
    for epochs in (2, 4):
        parts = network()
        fit(parts, batches(), epochs=epochs, checkpoint_dir=tmp_path, resume=True, **settings)
    assert torch.equal(weights(whole), weights(parts))


def test_a_failed_step_leaves_the_means() -> None:
    net = network()
    broken = copy.deepcopy(batches())
    broken[2][0][0, 0] = float("nan")
    with pytest.raises(dubito.NonFiniteError) as caught:
        fit(
            net, broken, likelihood=dubito.Categorical(), optimizer=ivon, epochs=1, progress=False,
            checkpoint_every=None,
        )  # fmt: skip
    assert caught.value.step == 3
    assert torch.equal(weights(net), weights(network()))  # nothing was kept before: back at the start


def test_random_weights_are_not_drawn_twice() -> None:
    bayes = dubito.bayesianize(network(), dubito.MeanField(), likelihood=dubito.Categorical())
    for optimizer in (ivon, ivon(bayes.parameters())):
        with pytest.raises(ValueError, match="from_ivon"):
            fit(bayes, batches(), optimizer=optimizer, epochs=1, progress=False)


def work(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    net, made, seen = network(), [], []

    def make(groups: Any) -> IVON:
        made.append(ivon(groups))
        return made[0]

    def look(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():  # not fit's trial
            seen.append(weights(module).clone())

    net.register_forward_pre_hook(look)
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    fit(net, loader, likelihood=dubito.Categorical(), optimizer=make, epochs=2, progress=False, clip_norm=1.0)
    curvature = [made[0].state[p]["hessian"] for p in net.parameters()]
    torch.save((weights(net), curvature, seen), folder / f"{rank}.pt")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes(tmp_path: Path) -> None:
    from accelerate.launchers import debug_launcher
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        debug_launcher(work, args=(tmp_path,), num_processes=2)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert len(first[2]) == len(second[2]) == 6
    assert not any(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
