"""Schedules of beta, the weight of the KL: warm-up and cycles. Stateless: step in, float out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dubito.scalar_checks import choice, count, non_negative

__all__ = ["CyclicalKL", "KLWarmup"]

Schedule = Literal["linear", "cosine"]


@dataclass(frozen=True)
class KLWarmup:
    """beta by step: `start` for `delay` steps, then rising to `end` over `steps` steps. Stateless.

    Call it with the step (or epoch) counted from 0; the last value stays. `steps=0` jumps.

    Args:
        steps: length of the ramp.
        start: beta before it.
        end: beta after it.
        delay: steps before the ramp begins.
        schedule: "linear" or "cosine".

    Raises:
        TypeError: steps that are not whole numbers.
        ValueError: negative or NaN values, unknown schedule.
    """

    steps: int
    start: float = 0.0
    end: float = 1.0
    delay: int = 0
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        count("steps", self.steps, "the length of the ramp", minimum=0)
        count("delay", self.delay, "the steps before the ramp", minimum=0)
        non_negative("start", self.start)
        non_negative("end", self.end)
        choice("schedule", self.schedule, Schedule)

    def __call__(self, step: int) -> float:
        """Beta at `step`, counted from 0."""
        done = count("step", step, "the step, counted from 0", minimum=0) - self.delay
        if done < 0:
            return float(self.start)
        return _ramp(done / self.steps if self.steps else 1.0, self.start, self.end, self.schedule)


@dataclass(frozen=True)
class CyclicalKL:
    """beta by step, annealed again and again (Fu et al. 2019): up over part of each period, then held.

    Args:
        period: steps of one cycle, >= 1.
        ramp: fraction of the cycle over which beta rises, in (0, 1].
        start: beta at the beginning of a cycle.
        end: beta at its end.
        schedule: "linear" or "cosine".

    Raises:
        TypeError: a period that is not a whole number.
        ValueError: period below 1, ramp outside (0, 1], negative or NaN betas, unknown schedule.
    """

    period: int
    ramp: float = 0.5
    start: float = 0.0
    end: float = 1.0
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        count("period", self.period, "the steps of one cycle")
        if not 0.0 < non_negative("ramp", self.ramp) <= 1.0:
            raise ValueError(f"ramp is a fraction of the period, in (0, 1], got {self.ramp}.")
        non_negative("start", self.start)
        non_negative("end", self.end)
        choice("schedule", self.schedule, Schedule)

    def __call__(self, step: int) -> float:
        """Beta at `step`, counted from 0."""
        within = count("step", step, "the step, counted from 0", minimum=0) % self.period
        return _ramp(within / (self.ramp * self.period), self.start, self.end, self.schedule)


def _ramp(fraction: float, start: float, end: float, schedule: Schedule) -> float:
    fraction = min(1.0, fraction)
    if schedule == "cosine":
        fraction = 0.5 * (1.0 - math.cos(math.pi * fraction))
    return (1.0 - fraction) * start + fraction * end
