"""Ratios of running times on a machine that others use too.

The two sides run in turns, in one thread, and are timed in CPU seconds of the process (user and system, so page faults
count); each turn gives one ratio, and the median over turns is what is reported. A side that is quicker than
`SHORTEST` is called several times a turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

import torch

Call = Callable[[], object]
LARGEST_HEAP_BLOCK = 2**25  # bytes: the most to which glibc's threshold adapts on 64-bit machines
SHORTEST = 0.004  # CPU seconds one turn of a side should take at least
WARM_UP = 3


@dataclass(frozen=True)
class Ratio:
    """A side's cost in units of the other's.

    Attributes:
        median, lower, upper: median and quartiles over the turns.
        reference_ms: CPU milliseconds of one call of the side divided by.
        turns: how many there were.
    """

    median: float
    lower: float
    upper: float
    reference_ms: float
    turns: int


def warm_heap() -> None:
    """Bring the allocator into the state of a program that has loaded its data.

    glibc gives freed memory back to the system beyond a threshold, which starts at 128 KB and follows the largest block
    freed so far, up to 32 MB. In a fresh process every temporary of some megabytes is therefore paid for in page faults
    (0.25 µs to 3 µs a page), again and again, and by chance: it depends on what lies behind it in the heap. One large
    block freed, as any data set does on its way in, ends this for both sides.
    """
    block = torch.empty(LARGEST_HEAP_BLOCK - 2**16, dtype=torch.uint8)
    block.fill_(0)
    del block


def ratio(call: Call, reference: Call, seconds: float = 6.0, fewest: int = 15, most: int = 151) -> Ratio:
    """CPU time of `call` over that of `reference`: turns until `seconds` of CPU are spent, within the bounds."""
    torch.set_num_threads(1)
    sides = (call, reference)
    repeats = []
    for side in sides:
        for _ in range(WARM_UP):
            once = _timed(side, 1)
        repeats.append(max(1, round(SHORTEST / max(once, 1e-7))))
    ratios, references = [], []
    start = process_time()
    while len(ratios) < fewest or (len(ratios) < most and process_time() - start < seconds):
        order = (0, 1) if len(ratios) % 2 else (1, 0)  # neither side always finds the other's caches
        times = {side: _timed(sides[side], repeats[side]) for side in order}
        ratios.append(times[0] / times[1])
        references.append(times[1])
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return Ratio(statistics.median(ratios), lower, upper, statistics.median(references) * 1000, len(ratios))


def _timed(call: Call, repeats: int) -> float:
    start = process_time()
    for _ in range(repeats):
        call()
    return (process_time() - start) / repeats
