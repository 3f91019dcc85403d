"""What random weights cost: CPU time in units of the plain network's, against the project's goals.

Run `python benchmarks/speed.py [--only NAME …] [--seconds S] [--json FILE]`; exits 1 where a goal is missed. The
protocol is in `benchmarks/README.md`, the timing in `benchmarks/timing.py`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from timing import Call, Ratio, ratio, warm_heap

N_DATA = 50_000
DRAWS = 32


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: what `--only` matches.
        goal: the largest ratio that meets the goal.
        sides: makes the call to measure and the one it is compared with.
    """

    name: str
    goal: float
    sides: Callable[[], tuple[Call, Call]]


# ---- training: forward, backward and KL, one draw ------------------------------------------------------------


def output_of(result: Any) -> Tensor:
    """An LSTM's outputs; anything else unchanged."""
    return result[0] if isinstance(result, tuple) else result


def training_step(module: nn.Module, x: Tensor, y: Tensor) -> Call:
    """Forward and backward of a mean squared error, and of the KL where there is one; gradients start empty."""
    parameters = list(module.parameters())
    kl = module.kl if isinstance(module, dubito.BayesianModule) else None

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss = F.mse_loss(output_of(module(x)), y)
        if kl is not None:
            loss = loss + kl() / N_DATA
        loss.backward()

    return step


def training(
    name: str, goal: float, make: Callable[[], nn.Module], shape: tuple[int, ...], family: dubito.Family
) -> Case:
    def sides() -> tuple[Call, Call]:
        plain = make()
        x = torch.randn(shape)
        with torch.no_grad():
            y = torch.randn_like(output_of(plain(x)))
        bayes = dubito.bayesianize(copy.deepcopy(plain), family)
        return training_step(bayes, x, y), training_step(plain, x, y)

    return Case(name, goal, sides)


# ---- prediction ----------------------------------------------------------------------------------------------


def prediction(name: str, goal: float, family: dubito.Family, estimator: str = "weights") -> Case:
    def sides() -> tuple[Call, Call]:
        plain = nn.Sequential(
            nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
        )
        x = torch.randn(128, 784)
        bayes = dubito.bayesianize(copy.deepcopy(plain), family, likelihood=dubito.Categorical())

        def forward() -> None:
            with torch.no_grad():
                plain(x)

        return lambda: bayes.predict(x, samples=DRAWS, estimator=estimator), forward

    return Case(name, goal, sides)


# ---- the cost of being wrapped -------------------------------------------------------------------------------


def wrapped(name: str, goal: float, **config: int) -> Case:
    def sides() -> tuple[Call, Call]:
        from transformers import BertConfig, BertModel

        plain = BertModel(BertConfig(vocab_size=100, max_position_embeddings=16, **config)).eval()
        bayes = dubito.bayesianize(copy.deepcopy(plain), dubito.Point()).train()
        bayes.module.eval()
        tokens = torch.randint(100, (1, 4))

        def call(module: nn.Module) -> Call:
            def forward() -> None:
                with torch.no_grad():
                    module(tokens)

            return forward

        return call(bayes), call(plain)

    return Case(name, goal, sides)


def cases() -> list[Case]:
    """All of them, with the goals of the project."""
    mean_field = dubito.MeanField()
    local = dubito.MeanField(estimator="local")
    linear_a = (lambda: nn.Linear(784, 1200), (128, 784))
    linear_b = (lambda: nn.Linear(1024, 1024), (256, 1024))
    lstm_a = (lambda: nn.LSTM(15, 64, batch_first=True), (64, 24, 15))
    lstm_b = (lambda: nn.LSTM(128, 128, batch_first=True), (32, 50, 128))
    conv_a = (lambda: nn.Conv2d(64, 64, 3, padding=1), (32, 64, 16, 16))
    conv_b = (lambda: nn.Conv2d(16, 32, 3, padding=1), (32, 16, 32, 32))

    def factors(rank: int) -> dubito.LowRankFactors:
        return dubito.LowRankFactors(rank=rank, init="random")

    return [
        training("linear-784-1200/mean-field", 2.2, *linear_a, mean_field),
        training("linear-1024-1024/mean-field", 1.7, *linear_b, mean_field),
        training("linear-784-1200/factors-25", 0.5, *linear_a, factors(25)),
        training("linear-1024-1024/factors-32", 0.5, *linear_b, factors(32)),
        training("linear-784-1200/local", 3.2, *linear_a, local),
        training("linear-1024-1024/local", 2.6, *linear_b, local),
        training("lstm-15-64/mean-field", 1.4, *lstm_a, mean_field),
        training("lstm-128-128/mean-field", 1.4, *lstm_b, mean_field),
        training("lstm-15-64/factors-14", 1.4, *lstm_a, factors(14)),
        training("lstm-128-128/factors-20", 1.4, *lstm_b, factors(20)),
        training("conv-64-64/mean-field", 1.15, *conv_a, mean_field),
        training("conv-16-32/mean-field", 1.15, *conv_b, mean_field),
        prediction("predict-mlp/factors-25", 15, factors(25)),
        prediction("predict-mlp/local", 41, mean_field, "local"),
        prediction("predict-mlp/mean-field", 90, mean_field),
        wrapped(
            "wrapped-bert-tiny/point",
            1.05,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
        ),
        wrapped(
            "wrapped-bert-12/point",
            1.05,
            hidden_size=32,
            num_hidden_layers=12,
            num_attention_heads=2,
            intermediate_size=64,
        ),
    ]


def report(case: Case, found: Ratio) -> str:
    verdict = "met" if found.median <= case.goal else "MISSED"
    return (
        f"{case.name:30} {found.median:8.3f}  [{found.lower:7.3f}, {found.upper:7.3f}] {case.goal:7g}  {verdict:7}"
        f"{found.reference_ms:9.3f} {found.turns:6}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the number of the exit says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="cases whose name contains one of these"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU seconds for each case (default 6)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too ('-': standard output)")
    parser.add_argument(
        "--fresh-heap", action="store_true", help="leave the allocator as a new process has it"
    )
    chosen = parser.parse_args(arguments)
    selected = [c for c in cases() if any(part in c.name for part in chosen.only)]
    if not selected:
        names = "\n  ".join(c.name for c in cases())
        parser.error(f"no case has {' or '.join(chosen.only)} in its name; there are:\n  {names}")
    if not chosen.fresh_heap:
        warm_heap()
    print(f"{'case':30} {'ratio':>8}  {'[quartiles]':>18} {'goal':>7}  {'':7}{'plain ms':>9} {'turns':>6}")
    rows: list[dict[str, Any]] = []
    for case in selected:
        torch.manual_seed(0)
        found = ratio(*case.sides(), seconds=chosen.seconds)
        print(report(case, found), flush=True)
        met = found.median <= case.goal
        rows.append({"case": case.name, "goal": case.goal, "met": met, **dataclasses.asdict(found)})
    if chosen.json == "-":
        print(json.dumps(rows, indent=2))
    elif chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
