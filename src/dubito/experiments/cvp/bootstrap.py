"""Is a difference in AURC more than chance? A paired bootstrap over test examples and seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 1000
LEVEL = 0.95

Examples = tuple[Tensor, Tensor]  # confidences, and whether the prediction was wrong


@dataclass(frozen=True)
class Difference:
    """A statistic of two methods' AURC (× 100), with its interval over resamples.

    Attributes:
        value: on the examples as they are.
        low, high: ends of the central 95 %.
    """

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> bool | None:
        """True where the whole interval is below zero, False where above; None is neither."""
        return True if self.high < 0 else False if self.low > 0 else None

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def weighted_aurc(examples: Examples, counts: Tensor) -> Tensor:
    """AURC × 100 (the mean of the risks r_k) of samples in which example i occurs `counts[b, i]` times: `(B,)`.

    Examples of equal confidence are answered together: their risk is that after the last of them.
    """
    confidence, wrong = examples
    levels, group = confidence.unique(return_inverse=True)
    place = len(levels) - 1 - group  # the surest first
    zeros = counts.new_zeros(len(counts), len(levels))
    number = zeros.index_add(1, place, counts)
    errors = zeros.index_add(1, place, counts * wrong.to(counts))
    risk = errors.cumsum(1) / number.cumsum(1).clamp_min(1)
    return 100 * (risk * number).sum(1) / number.sum(1)


def compare(
    ours: Sequence[Examples], theirs: Sequence[Examples], factor: float = 1.0, resamples: int = RESAMPLES
) -> Difference:
    """AURC of one method less `factor` times another's, averaged over seeds.

    Test examples are drawn with replacement, the same ones for both methods and for all seeds, and so are seeds.

    Args:
        ours: by seed, confidences and errors on the same test examples.
        theirs: likewise, seeds in the same order.
        factor: 1.02 asks whether ours is within 2 % of theirs.
        resamples: how many.

    Raises:
        ValueError: for seeds that do not pair, or examples that differ in number.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"there are {len(ours)} seeds of one method and {len(theirs)} of the other")
    size = len(ours[0][1])
    if any(len(wrong) != size for _, wrong in (*ours, *theirs)):
        raise ValueError("the seeds have different numbers of test examples: they cannot be paired")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(size, (resamples, size), generator=generator)
    counts = torch.zeros(resamples, size, dtype=torch.float64)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    counts = torch.cat((torch.ones(1, size, dtype=torch.float64), counts))
    gaps = torch.stack(
        [
            weighted_aurc(a, counts) - factor * weighted_aurc(b, counts)
            for a, b in zip(ours, theirs, strict=True)
        ]
    )
    seeds = torch.randint(len(ours), (len(ours), resamples), generator=generator)
    spread = gaps[:, 1:].gather(0, seeds).mean(0).sort().values
    cut = math.floor((1 - LEVEL) / 2 * resamples)
    return Difference(float(gaps[:, 0].mean()), float(spread[cut]), float(spread[resamples - 1 - cut]))
