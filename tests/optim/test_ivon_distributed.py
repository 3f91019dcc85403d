"""IVON in two processes over gloo: one posterior, two noises."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from dubito import IVON

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

STEPS = 3


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 3), "odd": nn.Linear(8, 3)}).double()
    return net, torch.randn(24, 4, dtype=torch.float64), torch.randint(3, (24,))


def output(net: Any, x: Tensor, odd: bool) -> Tensor:
    hidden = torch.tanh(net["body"](x))
    return net["head"](hidden) + (net["odd"](hidden) if odd else 0)  # one process only uses "odd"


def optimizer_of(net: nn.Module) -> IVON:
    return IVON(net.parameters(), lr=0.1, ess=24, betas=(0.9, 0.9), weight_decay=0.01, seed=4)


def work(rank: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        net, x, y = problem()
        optimizer = optimizer_of(net)
        share = slice(12 * rank, 12 * rank + 12)
        record = []
        for step in range(STEPS):
            if step == 2:  # a state of the first process goes to both
                states = [None, None]
                dist.all_gather_object(states, optimizer.state_dict())
                optimizer = optimizer_of(net)
                optimizer.load_state_dict(states[0])
            optimizer.zero_grad()
            mean = [p.detach().clone() for p in net.parameters()]
            with optimizer.sampled_params():
                drawn = [p.detach().clone() for p in net.parameters()]
                F.cross_entropy(output(net, x[share], rank == 1), y[share]).backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
            optimizer.step()
            after = [p.detach().clone() for p in net.parameters()]
            curvature = [optimizer.state[p]["hessian"].clone() for p in net.parameters()]
            record.append({"mean": mean, "drawn": drawn, "g": gradients, "after": after, "h": curvature})
        refused = ""
        wrapped = nn.parallel.DistributedDataParallel(net["body"])
        other = IVON(net["body"].parameters(), lr=0.1, ess=24, seed=4)
        with other.sampled_params():
            wrapped(x[share]).square().mean().backward()
        try:
            other.step()
        except RuntimeError as error:
            refused = str(error)
        torch.save((record, refused), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_a_posterior_and_no_noise(tmp_path: Path) -> None:
    mp.spawn(work, args=(tmp_path,), nprocs=2)
    (first, refused), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for a, b in zip(first, second, strict=True):
        for name in ("after", "h"):
            assert all(torch.equal(p, q) for p, q in zip(a[name], b[name], strict=True))
        assert not any(torch.equal(p, q) for p, q in zip(a["drawn"], b["drawn"], strict=True))
    for i in range(len(first[0]["h"])):  # the first step's curvature, by hand
        estimates = []
        for part in (first[0], second[0]):
            gradient = part["g"][i]
            zeros = torch.zeros_like(part["mean"][i])
            estimates.append(zeros if gradient is None else gradient * (part["drawn"][i] - part["mean"][i]))
        estimate = (estimates[0] + estimates[1]) / 2 * 24 * 1.01
        expected = 0.9 + 0.1 * estimate + 0.5e-2 * (1 - estimate) ** 2 / 1.01
        torch.testing.assert_close(first[0]["h"][i], expected)
    assert "averaged before" in refused
    assert "no_sync" in refused
