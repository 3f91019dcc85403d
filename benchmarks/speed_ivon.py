"""What IVON costs: a training step against Adam's, and its own part of the step (draw, restore, update) alone.

Run `python benchmarks/speed_ivon.py [--seconds S]`; exits 1 where a goal is missed. The timing is that of
`benchmarks/timing.py`: CPU seconds of both sides in turns, the median ratio. The draw is what costs on a processor:
its normal numbers alone take longer than Adam's update.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn

import dubito
from dubito.experiments.ibvi.contestants import NETWORKS
from timing import Call, ratio, warm_heap

BATCH = 128
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], Call]


def adam_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Call:
    """A whole step with Adam."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def ivon_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Call:
    """A whole step with IVON, one draw."""
    optimizer = dubito.IVON(net.parameters(), lr=0.01, ess=60_000)

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def draws_alone(net: nn.Module) -> Call:
    """Only the normal numbers of one draw."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.empty_like(p) for p in net.parameters()]

    def draw() -> None:
        for tensor in noise:
            tensor.normal_(generator=generator)

    return draw


def update_alone(make: Callable[[nn.Module], torch.optim.Optimizer], net: nn.Module) -> Call:
    """What the optimizer does, the gradient being there."""
    optimizer = make(net)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 1e-3

    def step() -> None:
        if isinstance(optimizer, dubito.IVON):
            with optimizer.sampled_params():
                pass
        optimizer.step()

    return step


def cases() -> dict[str, tuple[float, Call, Call]]:
    """Goal, side and reference by name."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    found: dict[str, tuple[float, Call, Call]] = {}
    for name in ("lenet5", "resnet"):
        first, second = NETWORKS[name].make(), NETWORKS[name].make()
        found[f"{name}/step"] = (1.25, ivon_step(first, x, y), adam_step(second, x, y))
    wide = [nn.Linear(1000, 1000) for _ in range(3)]

    def ivon(net: nn.Module) -> torch.optim.Optimizer:
        return dubito.IVON(net.parameters(), lr=1e-3, ess=60_000)

    reference = update_alone(lambda net: torch.optim.Adam(net.parameters()), wide[1])
    found["update, 1e6 weights"] = (6.0, update_alone(ivon, wide[0]), reference)
    found["normal numbers alone"] = (2.5, draws_alone(wide[2]), reference)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the number of the exit says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU seconds for each case (default 6)")
    chosen = parser.parse_args(arguments)
    warm_heap()
    torch.manual_seed(0)
    missed = False
    print(f"{'case':22} {'ratio':>7} {'[quartiles]':>16} {'goal':>6}          Adam ms")
    for name, (goal, side, reference) in cases().items():
        found = ratio(side, reference, seconds=chosen.seconds)
        missed |= found.median > goal
        print(
            f"{name:22} {found.median:7.3f} [{found.lower:6.3f}, {found.upper:6.3f}] {goal:6g}  "
            f"{'met' if found.median <= goal else 'MISSED':7} {found.reference_ms:8.2f}",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
