"""Two processes on one machine, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.training import fit

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def train(folder: Path, batch: int) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    net = network(rank)  # each process begins elsewhere: the first one's weights must win
    fit(net, DataLoader(data(), batch), likelihood=dubito.Categorical(), epochs=3, optimizer=sgd)
    parts, _ = bayesian(folder / "parts", batch, (1, 2))
    whole, seen = bayesian(folder / "whole", batch, (2,))
    torch.save((net.state_dict(), parts.state_dict(), whole.state_dict(), seen), folder / f"{rank}.pt")


def bayesian(
    folder: Path, batch: int, epochs: tuple[int, ...]
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    for until in epochs:
        torch.manual_seed(0)
        bayes = dubito.bayesianize(network(0), dubito.MeanField(scale=0.5), likelihood=dubito.Categorical())
        seen: list[tuple[Tensor, Tensor]] = []

        def look(module: nn.Module, inputs: tuple[Tensor], into: list[tuple[Tensor, Tensor]] = seen) -> None:
            if torch.is_grad_enabled():  # not fit's trial
                into.append((inputs[0], torch.get_rng_state()))

        bayes.register_forward_pre_hook(look)
        fit(
            bayes, DataLoader(data(), batch, shuffle=True), epochs=until, resume=True, optimizer=sgd,
            checkpoint_dir=folder, diagnostics=False,
        )  # fmt: skip
    return bayes, seen


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    from accelerate.launchers import debug_launcher
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        debug_launcher(train, args=(tmp_path, 4), num_processes=2)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = network(0)
    fit(alone, DataLoader(data(), 8), likelihood=dubito.Categorical(), epochs=3, optimizer=sgd)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(first[0][name], value, rtol=1e-10, atol=1e-12)
    for part in (0, 1, 2):  # the processes agree
        assert all(torch.equal(value, second[part][name]) for name, value in first[part].items())
    assert all(torch.equal(value, first[2][name]) for name, value in first[1].items())  # and resume exactly
    epoch = torch.cat([x for x, _ in (*first[3][:3], *second[3][:3])])
    assert len(epoch.unique(dim=0)) == 24  # each example once between them
    assert not torch.equal(first[3][0][1], second[3][0][1])  # equal noise would not be averaged out
