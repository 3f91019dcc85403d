"""What low-rank factors cost a Transformer against full-rank mean field, at the paper's width 256.

Run `python benchmarks/singular_transformer.py [--seconds S] [--json FILE]`; exits 1 where a goal is missed. The encoder
is that of the sentiment experiment: 4 layers, width 256, feed-forward 512, 64 pieces a sentence, a vocabulary of 8,192,
rank 16 in every matrix, the embedding included. One call is a whole training step on 64 sentences: forward with one
draw, mean negative log-likelihood, KL / N, backward, Adam. The timing is that of `benchmarks/timing.py`: CPU seconds of
both sides in turns, the median ratio. Memory is the peak of the resident set over a few steps above what it was before
the network was made, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import resource
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import dubito
from dubito.experiments.singular.sentiment_network import FACTORED, Encoder, EncoderShape
from timing import Call, ratio, warm_heap

VOCABULARY, RANK, BATCH, N_DATA, MEMORY_STEPS = 8192, 16, 64, 67_349, 3
PARAMETER_GOAL, TIME_GOAL, MEMORY_GOAL = 0.1, 0.7, 1.0
SIDES = ("low-rank", "mean-field")


def shape() -> EncoderShape:
    return EncoderShape(VOCABULARY, length=64, width=256, inner=512)


def network(side: str) -> dubito.BayesianModule:
    torch.manual_seed(0)
    families: dict[Any, dubito.Family] = {"rest": dubito.MeanField()}
    if side == "low-rank":
        families = {**dict.fromkeys(FACTORED, dubito.LowRankFactors(RANK, "random")), **families}
    return dubito.bayesianize(Encoder(shape()), families, likelihood=dubito.Categorical()).train()


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces by Zipf's law, as words come; lengths from a quarter to the whole."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(3, VOCABULARY + 3).double()
    pieces = torch.multinomial(weights[:-3], BATCH * 64, replacement=True, generator=generator) + 3
    pieces = pieces.reshape(BATCH, 64)
    lengths = torch.randint(16, 65, (BATCH, 1), generator=generator)
    return pieces.masked_fill(torch.arange(64) >= lengths, 0), torch.randint(2, (BATCH,), generator=generator)


def training(bayes: dubito.BayesianModule) -> Call:
    """A whole step, the optimiser's included."""
    x, y = sentences()
    optimizer = torch.optim.Adam(bayes.parameters(), lr=2e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = bayes.nll(bayes(x), y).mean() + bayes.kl() / N_DATA
        loss.backward()
        optimizer.step()

    return step


def parameters(bayes: dubito.BayesianModule) -> int:
    return sum(p.numel() for p in bayes.parameters())


def peak_memory(side: str) -> int:
    """Bytes by which the resident set grew at most while a fresh process made the network and trained it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_grown, (side,))


def _grown(side: str) -> int:
    torch.set_num_threads(1)
    small = torch.nn.Linear(2, 2)  # what the first step of any kind loads is nobody's
    optimizer = torch.optim.Adam(small.parameters())
    small(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = _peak()
    step = training(network(side))
    for _ in range(MEMORY_STEPS):
        step()
    return _peak() - before


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the number of the exit says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="CPU seconds for the timing (default 30)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    chosen = parser.parse_args(arguments)
    low_rank, mean_field = (network(side) for side in SIDES)
    counts = [parameters(bayes) for bayes in (low_rank, mean_field)]
    memory = [peak_memory(side) for side in SIDES]
    warm_heap()
    time = ratio(training(low_rank), training(mean_field), seconds=chosen.seconds, fewest=7, most=51)
    spread = f"[{time.lower:.3f}, {time.upper:.3f}] of {time.reference_ms:.0f} ms"
    rows: list[dict[str, Any]] = []
    for case, value, goal, of in (
        ("parameters", counts[0] / counts[1], PARAMETER_GOAL, f"{counts[0]:,} of {counts[1]:,}"),
        (
            "training-step",
            time.median,
            TIME_GOAL,
            spread,
        ),
        (
            "peak-memory",
            memory[0] / memory[1],
            MEMORY_GOAL,
            f"{memory[0] / 2**20:.0f} of {memory[1] / 2**20:.0f} MB",
        ),
    ):
        met = value <= goal
        print(f"{case:14} {value:6.3f} {goal:6g}  {'met' if met else 'MISSED':7} {of}", flush=True)
        rows.append({"case": case, "ratio": value, "goal": goal, "met": met, "of": of})
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows, "timing": dataclasses.asdict(time)}, file, indent=2)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
