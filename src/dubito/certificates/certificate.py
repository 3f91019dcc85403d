"""What a certificate says: a bound, which predictor it is about, what it assumes, and what was measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Predictor = Literal["Gibbs", "posterior mean", "centre network", "plain network"]

#: What the names of predictors mean.
PREDICTORS: Mapping[Predictor, str] = MappingProxyType(
    {
        "Gibbs": "one fresh draw of the weights a prediction",
        "posterior mean": "the average of the outputs over the posterior",
        "centre network": "the network at the posterior mean of its weights",
        "plain network": "a network with fixed weights",
    }
)


class RefusedError(ValueError):
    """A certificate was asked for under conditions in which it would not hold; the message says what would mend it."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A bound with its fine print; `print` it.

    Attributes:
        name: which certificate.
        predictor: which predictor it certifies (`PREDICTORS` says what the names mean).
        statement: the inequality, in words and symbols.
        bound: its right-hand side.
        trivial: what is known without it; at or above this the bound says nothing.
        assumptions: what it takes for granted, one sentence each; a bound is worth no more than they are.
        measured: the numbers that went into it.
    """

    name: str
    predictor: Predictor
    statement: str
    bound: float
    trivial: float
    assumptions: tuple[str, ...]
    measured: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if math.isnan(self.bound):
            raise ValueError(f"{self.name}: the bound is NaN, so what went into it is: {dict(self.measured)}")
        object.__setattr__(self, "measured", MappingProxyType(dict(self.measured)))

    @property
    def vacuous(self) -> bool:
        """Whether the bound says no more than is known without it."""
        return not self.bound < self.trivial

    @property
    def verdict(self) -> str:
        """The bound in a few words."""
        if not self.vacuous:
            return f"{self.bound:.4g}"
        return f"{self.bound:.4g}, VACUOUS (≥ {self.trivial:.4g}, which holds without it)"

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) of everything but the assumptions."""
        about = f"{self.predictor}: {PREDICTORS[self.predictor]}"
        rows = [("certifies", about), ("states", self.statement), ("bound", self.verdict)]
        return rows + [(name, _figure(value)) for name, value in self.measured.items()]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        lines = [self.name, "-" * len(self.name)]
        for label, text in rows:
            lines += textwrap.wrap(
                text, 110, initial_indent=label.ljust(width + 2), subsequent_indent=" " * (width + 2)
            )
        lines.append("assumes")
        for sentence in self.assumptions:
            lines += textwrap.wrap(sentence, 110, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        """A table, for `rich.print`."""
        from rich.table import Table

        table = Table(title=self.name, show_header=False)
        for label, text in self.rows():
            table.add_row(label, text, style="red" if label == "bound" and self.vacuous else None)
        table.add_section()
        for sentence in self.assumptions:
            table.add_row("assumes", sentence)
        return table


def _figure(value: float) -> str:
    whole = isinstance(value, int) or (math.isfinite(value) and value == round(value) and abs(value) < 1e15)
    return f"{round(value):,}" if whole and not isinstance(value, bool) else f"{value:.4g}"
