"""Point: no randomness. The parameter stays an ordinary parameter, trained as ever."""

from __future__ import annotations

from dataclasses import dataclass

from dubito.weights.family import Family, Group, WeightPosterior


@dataclass(frozen=True)
class Point(Family):
    """A parameter without randomness: q(w) is a point mass at the module's own value.

    It says in a pattern mapping what silence would also say, so that `{"*": MeanField(), ...}` can be
    excepted by name: `{"rest": MeanField(), "norm": Point()}`.
    """

    def attach(self, group: Group) -> WeightPosterior | None:
        """Nothing to hold: the parameters stay where and what they are."""
        return None
