"""Tables of numbers and factors, and their preparation for a network, fitted on training rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Features:
    """Rows of a table.

    Attributes:
        numbers: by name, float64 `(N,)`, NaN where not measured.
        factors: by name, one word a row.
    """

    numbers: Mapping[str, Tensor]
    factors: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        lengths = [len(column) for column in self.numbers.values()]
        lengths += [len(column) for column in self.factors.values()]
        return lengths[0] if lengths else 0

    def rows(self, index: Tensor) -> Features:
        """Some of the rows: whole numbers, `(M,)`."""
        at = index.tolist()
        return Features(
            {name: column[index] for name, column in self.numbers.items()},
            {name: tuple(column[i] for i in at) for name, column in self.factors.items()},
        )

    def only(self, numbers: tuple[str, ...], factors: tuple[str, ...]) -> Features:
        """Some of the columns.

        Raises:
            KeyError: for one that is not there.
        """
        return Features(
            {name: self.numbers[name] for name in numbers}, {name: self.factors[name] for name in factors}
        )


@dataclass(frozen=True)
class Preparation:
    """From rows to a float32 matrix; made by `fit`.

    Numbers are clipped, a missing one takes the training median, all are standardised; a column that is missing in at
    least one training row of a hundred gets a further one that says where. Factors become one column a level met in
    training; a level not met there has zeros.

    Attributes:
        numbers: by name (least, most, median, mean, standard deviation), of training rows.
        indicated: names of the columns with an indicator.
        levels: of the factors, by name.
    """

    numbers: Mapping[str, tuple[float, float, float, float, float]]
    indicated: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]

    @classmethod
    def fit(cls, train: Features, reach: float = 8.0, indicators: bool = True) -> Preparation:
        """Look at the training rows.

        Args:
            train: the rows.
            reach: values further than this many interquartile ranges outside the quartiles are clipped there.
            indicators: whether columns say where they were missing.

        Raises:
            ValueError: for a column that was measured in no row.
        """
        numbers = {}
        for name, column in train.numbers.items():
            known = column[~column.isnan()]
            if not len(known):
                raise ValueError(
                    f"column {name!r} has no measured value among the training rows: leave it out"
                )
            quartiles = torch.quantile(known, torch.tensor([0.25, 0.5, 0.75], dtype=known.dtype))
            low, median, high = (float(q) for q in quartiles)
            span = reach * (high - low)
            # where most rows are equal the range is zero, and clipping would leave nothing of the others
            least, most = (low - span, high + span) if span > 0 else (float(known.min()), float(known.max()))
            filled = column.clamp(least, most).nan_to_num(nan=median)
            sd = float(filled.std(unbiased=False))
            numbers[name] = (least, most, median, float(filled.mean()), sd if sd > 0 else 1.0)
        indicated = tuple(
            n for n, c in train.numbers.items() if indicators and float(c.isnan().double().mean()) >= 0.01
        )
        levels = {name: tuple(sorted(set(column))) for name, column in train.factors.items()}
        return cls(numbers, indicated, levels)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the matrix's columns."""
        levels = (f"{name}={level}" for name, found in self.levels.items() for level in found)
        return (*self.numbers, *(f"{name} missing" for name in self.indicated), *levels)

    def __call__(self, rows: Features) -> Tensor:
        """The matrix, `(N, columns)`."""
        columns = []
        for name, (least, most, median, mean, sd) in self.numbers.items():
            columns.append((rows.numbers[name].clamp(least, most).nan_to_num(nan=median) - mean) / sd)
        columns += [rows.numbers[name].isnan().double() for name in self.indicated]
        for name, found in self.levels.items():
            given = rows.factors[name]
            columns += [torch.tensor([word == level for word in given]).double() for level in found]
        return torch.stack(columns, 1).float()
