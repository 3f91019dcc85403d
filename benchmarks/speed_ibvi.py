"""What implicit-bias inference costs: a training step of LeNet-5, and prediction where only the last layer is random.

Run `python benchmarks/speed_ibvi.py [--seconds S] [--json FILE]`; exits 1 where a goal is missed. The timing is that of
`benchmarks/timing.py`: CPU seconds of both sides in turns, the median ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import dubito
from dubito.experiments.ibvi.contestants import NETWORKS
from dubito.experiments.ibvi.training import BATCH, groups, loss_of, sgd, with_low_rank
from timing import Call, ratio, warm_heap

DRAWS = 32


def training(network: str) -> tuple[Call, Call]:
    """A whole step (forward, backward, SGD with momentum), first and last layer random, against plain."""
    architecture = NETWORKS[network]
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def step_of(model: nn.Module, parameters: Any) -> Call:
        optimizer, loss = sgd(parameters, 1e-3), loss_of(model, 1)

        def step() -> None:
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()

        return step

    plain = architecture.make()
    bayes = with_low_rank(architecture.make(), architecture.first_last, architecture.ibvi)
    return step_of(bayes, groups(bayes, architecture.ibvi)), step_of(plain, plain.parameters())


def prediction() -> tuple[Call, Call]:
    """32 draws of a ResNet whose last layer alone is random against one plain forward pass."""
    architecture = NETWORKS["resnet"]
    x = torch.randn(BATCH, 1, 28, 28)
    plain = architecture.make().eval()
    bayes = with_low_rank(architecture.make(), ("out",), architecture.ibvi)

    def forward() -> None:
        with torch.no_grad():
            plain(x)

    return lambda: bayes.predict(x, samples=DRAWS, keep_draws=False), forward


CASES: dict[str, tuple[float, Callable[[], tuple[Call, Call]]]] = {
    "lenet5/train-first-last": (1.3, lambda: training("lenet5")),
    "resnet/train-first-last": (1.15, lambda: training("resnet")),
    "resnet/predict-last-32": (1.5, prediction),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the number of the exit says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU seconds for each case (default 6)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    chosen = parser.parse_args(arguments)
    warm_heap()
    rows: list[dict[str, Any]] = []
    print(
        f"{'case':26} {'ratio':>7} {'[quartiles]':>16} {'goal':>6}          plain ms  (dubito {dubito.__version__})"
    )
    for name, (goal, sides) in CASES.items():
        torch.manual_seed(0)
        found = ratio(*sides(), seconds=chosen.seconds)
        met = found.median <= goal
        print(
            f"{name:26} {found.median:7.3f} [{found.lower:6.3f}, {found.upper:6.3f}] {goal:6g}  "
            f"{'met' if met else 'MISSED':7} {found.reference_ms:8.2f}",
            flush=True,
        )
        rows.append({"case": name, "goal": goal, "met": met, **dataclasses.asdict(found)})
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
