"""What low-rank factors cost: CPU time beside the plain network's, and a Transformer beside full-rank mean field.

Run `python benchmarks/speed_singular.py [--only NAME …] [--seconds S] [--json FILE]`; exits 1 where a goal is missed.
Timing and protocol are those of `benchmarks/speed.py` (one thread, CPU seconds of both sides in turns, median ratio).

`transformer-…` compares two Bayesian networks: a pre-norm encoder of four layers, d = 256, feed-forward 512, four
heads, a vocabulary of 8,000 and classification at the first token; factors of rank 16 everywhere against mean field,
a whole training step each (with Adam). Peak memory is that of a process of its own for each side, above what it held
before the network was made.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from speed import DRAWS, Case, report, training
from timing import Call, ratio, warm_heap

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH, RANK = 8000, 256, 4, 64, 16, 16
PARAMETERS_GOAL, TIME_GOAL, MEMORY_GOAL = 0.1, 0.7, 1.0


def factors(rank: int, estimator: Any = "weights") -> dubito.LowRankFactors:
    """Factors drawn anew, biases as the family falls back."""
    return dubito.LowRankFactors(rank=rank, init="random", estimator=estimator)


def layer_prediction(inputs: int, outputs: int, batch: int, rank: int) -> tuple[Call, Call]:
    """32 draws of one layer's output, against one plain forward pass."""
    plain = nn.Linear(inputs, outputs)
    x = torch.randn(batch, inputs)
    bayes = dubito.bayesianize(nn.Linear(inputs, outputs), {"weight": factors(rank)})

    def draws() -> None:
        with torch.no_grad():
            bayes.outputs(x, samples=DRAWS).mean(0)

    def forward() -> None:
        with torch.no_grad():
            plain(x)

    return draws, forward


class Encoder(nn.Module):
    """A pre-norm Transformer that classifies a sequence of tokens by its first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.tokens(tokens) + self.positions)[:, 0])
        return output


def transformer(family: str) -> dubito.BayesianModule:
    """The encoder under one of the two families; biases, positions and normalisation stay ordinary parameters."""
    chosen: dubito.Family = factors(RANK) if family == "factors" else dubito.MeanField()
    head = factors(1) if family == "factors" else chosen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        matrices = ("tokens.weight", "layers.*.self_attn.*weight", "layers.*.linear?.weight")
        families = {"head.weight": head, **dict.fromkeys(matrices, chosen)}
        return dubito.bayesianize(Encoder(), families, likelihood=dubito.Categorical())


def transformer_step(family: str) -> Call:
    """Forward, KL, backward and Adam."""
    bayes = transformer(family)
    optimizer = torch.optim.Adam(bayes.parameters(), lr=2e-4)
    x, y = torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(2, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(bayes(x), y) + bayes.kl() / 67_349).backward()
        optimizer.step()

    return step


def variational_parameters(family: str) -> int:
    """Entries of the posterior: means and spreads."""
    bayes = transformer(family)
    covered = {
        id(s.parameter): s.parameter.numel() for p in bayes.posteriors() if not p.takes_over for s in p.slots
    }
    return sum(p.numel() for q in bayes.posteriors() for p in q.parameters()) + sum(covered.values())


def resident_kilobytes() -> int:
    """The largest resident size of this program (Linux; `getrusage` would count the parent's before it too)."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def peak_of(family: str) -> int:
    """Kilobytes that training under a family adds at its peak, in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", family]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout.split()[-1])


def measure_peak(family: str) -> None:
    """In that process: print the kilobytes."""
    torch.set_num_threads(1)
    before = resident_kilobytes()
    step = transformer_step(family)
    for _ in range(3):
        step()
    print(resident_kilobytes() - before)


def cases() -> list[Case]:
    """All ratios of time, with the goals of the project."""
    linear_a = (functools.partial(nn.Linear, 784, 1200), (128, 784))
    linear_b = (functools.partial(nn.Linear, 1024, 1024), (256, 1024))
    lstm = (functools.partial(nn.LSTM, 15, 64, batch_first=True), (64, 24, 15))
    return [
        training("linear-784-1200/factors-25", 0.5, *linear_a, factors(25)),
        training("linear-1024-1024/factors-25", 0.5, *linear_b, factors(25)),
        training("linear-784-1200/two-stage-25", 0.8, *linear_a, factors(25, "local")),
        training("linear-1024-1024/two-stage-25", 0.8, *linear_b, factors(25, "local")),
        training("lstm-15-64/factors-14", 1.4, *lstm, factors(14)),
        Case("predict-784-1200/factors-25", 6.0, lambda: layer_prediction(784, 1200, 128, 25)),
        Case("predict-1024-1024/factors-32", 6.0, lambda: layer_prediction(1024, 1024, 256, 32)),
        Case(
            "transformer-256/time", TIME_GOAL,
            lambda: (transformer_step("factors"), transformer_step("mean field")),
        ),
    ]  # fmt: skip


def sizes() -> list[dict[str, Any]]:
    """Parameters and peak memory of the Transformer, factors over mean field."""
    rows = []
    for name, goal, measure in (
        ("transformer-256/parameters", PARAMETERS_GOAL, variational_parameters),
        ("transformer-256/memory", MEMORY_GOAL, peak_of),
    ):
        ours, other = measure("factors"), measure("mean field")
        rows.append(
            {"case": name, "goal": goal, "met": ours / other < goal, "median": ours / other, "of": other}
        )
    return rows


def main() -> int:
    """Measure and print; the number of the exit says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="cases with one of these in their names"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="CPU seconds for each case (default 6)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--peak-of", choices=("factors", "mean field"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak_of:
        measure_peak(chosen.peak_of)
        return 0
    warm_heap()
    print(f"{'case':30} {'ratio':>8}  {'[quartiles]':>18} {'goal':>7}  {'':7}{'other ms':>9} {'turns':>6}")
    rows: list[dict[str, Any]] = []
    for case in cases():
        if not any(part in case.name for part in chosen.only):
            continue
        torch.manual_seed(0)
        found = ratio(*case.sides(), seconds=chosen.seconds)
        print(report(case, found), flush=True)
        met = found.median <= case.goal
        rows.append({"case": case.name, "goal": case.goal, "met": met, **dataclasses.asdict(found)})
    if any(part in "transformer-256/parameters memory" for part in chosen.only):
        for row in sizes():
            verdict = "met" if row["met"] else "MISSED"
            print(
                f"{row['case']:30} {row['median']:8.3f}  {'':18} {row['goal']:7g}  {verdict:7}  of {row['of']:,}"
            )
            rows.append(row)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
