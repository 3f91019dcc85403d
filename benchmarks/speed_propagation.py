"""What one pass with means and variances costs, in units of one eager deterministic pass, against the project's goals.

Run `python benchmarks/speed_propagation.py [--only NAME …] [--seconds S] [--batch N] [--json FILE]`; exits 1 where a
goal is missed. The protocol is in `benchmarks/README.md`, the timing in `benchmarks/timing.py`; the two compiled modes
need a C++ compiler and some minutes for it.
"""

from __future__ import annotations

import argparse
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dubito
from dubito.moments import Context, compiled, fused, gaussian_weights, propagated, rule_set
from dubito.moments.propagate import condensed
from timing import Call, Ratio, ratio, warm_heap

BATCH = 64


class Block(nn.Module):
    """A residual block: in-place ReLU, `+=`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Three blocks of 24 channels on 32 × 32 images, global average pooling."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(channels) for _ in range(3)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


def vision_transformer() -> nn.Module:
    """Hugging Face's, of width 192 and depth 6, on 36 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=48,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vit": (vision_transformer, (3, 48, 48)),
    "resnet": (ResNet, (3, 32, 32)),
}
GOALS = {
    ("vit", "fused"): 3.1,
    ("resnet", "fused"): 3.9,
    ("vit", "compiled"): 1.7,
    ("resnet", "compiled"): 2.4,
    ("vit", "memory"): 2.2,
    ("resnet", "memory"): 2.2,
}
MODES = ("eager", "fused", "fused-rank-one", "compiled", "memory")


@dataclass(frozen=True)
class Measured:
    """One row: a ratio and its goal (None: there is none)."""

    name: str
    goal: float | None
    ratio: Ratio


def made(name: str, batch: int) -> tuple[dubito.BayesianModule, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    bayes = dubito.bayesianize(make().eval(), dubito.MeanField(scale=0.05), likelihood=dubito.Categorical())
    return bayes.eval(), torch.randn(batch, *shape)


def call_of(mode: str, bayes: dubito.BayesianModule, x: Tensor) -> Call:
    """A propagation of one batch. The weights' moments are made before, as they are for a stream of batches."""
    if mode == "compiled":
        run = compiled(bayes, x)
        return lambda: run.moments(x)
    rules = rule_set("cvp", weights="rank-one" if mode.endswith("rank-one") else "full")
    weights = condensed(gaussian_weights(bayes), rules)

    def propagate() -> object:
        with torch.no_grad(), fused(mode.startswith("fused")):
            return propagated(bayes, x, Context(rules), weights)

    return propagate


def deterministic(bayes: dubito.BayesianModule, x: Tensor) -> Call:
    def call() -> object:
        with torch.no_grad():
            return bayes.module(x)

    return call


def measure(name: str, mode: str, seconds: float, batch: int) -> Measured:
    bayes, x = made(name, batch)
    with torch.no_grad():
        call = call_of(mode, bayes, x)
        return Measured(
            f"{name}/{mode}", GOALS.get((name, mode)), ratio(call, deterministic(bayes, x), seconds)
        )


# ---- memory ---------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes of tensors that operators made and that live at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                ref = StorageWeakRef(value.untyped_storage())
                if ref not in given:
                    self.alive[ref] = value.untyped_storage().nbytes()
        self.most = max(self.most, sum(self.alive.values()))
        return result


def memory(name: str, batch: int) -> Measured:
    """Peak memory of a pass (activations and temporaries, weights left out), over that of a deterministic one."""
    bayes, x = made(name, batch)
    peaks = []
    with torch.no_grad():
        for call in (call_of("eager", bayes, x), deterministic(bayes, x)):
            with Peak() as peak:
                call()
            peaks.append(peak.most)
    value = peaks[0] / peaks[1]
    return Measured(f"{name}/memory", GOALS[name, "memory"], Ratio(value, value, value, peaks[1] / 2**20, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds a row")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--json", help="write the rows here ('-': standard output)")
    given = parser.parse_args()
    warm_heap()
    rows: list[Measured] = []
    for name in NETWORKS:
        for mode in MODES:
            if given.only and not any(word in f"{name}/{mode}" for word in given.only):
                continue
            row = (
                memory(name, given.batch)
                if mode == "memory"
                else measure(name, mode, given.seconds, given.batch)
            )
            rows.append(row)
            print(line(row), flush=True)
    if given.json:
        text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
        print(text) if given.json == "-" else write(given.json, text)
    return int(any(row.goal is not None and row.ratio.median > row.goal for row in rows))


def line(row: Measured) -> str:
    goal = (
        ""
        if row.goal is None
        else f"goal {row.goal:.1f} {'met' if row.ratio.median <= row.goal else 'MISSED'}"
    )
    r, unit = row.ratio, "MB" if row.name.endswith("memory") else "ms"
    spread = f"[{r.lower:.2f}, {r.upper:.2f}]"
    return f"{row.name:<18}{r.median:6.2f}  {spread}  {goal:<16}{r.reference_ms:9.1f} {unit}  {r.turns}"


def write(path: str, text: str) -> Any:
    with open(path, "w") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
