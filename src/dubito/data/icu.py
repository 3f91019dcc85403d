"""Seriously ill adults: SUPPORT2 and RHC, with death within 30 days; and any such table of one's own.

The two are one study. Every RHC patient's age and sex is that of a SUPPORT2 patient, and where the match is unique the
30-day outcomes agree in all but 21 of 4,598: RHC is intensive-care patients of the same cohort on their first day,
SUPPORT2 the cohort on its third. `unseen` leaves out who may have been trained on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from dubito.data.csv_table import CsvTable, TableError, find_csv, read_csv
from dubito.data.tabular import Features

DAYS = 30
COMA = "coma"

# left out: what happened after admission (fac_sfdm2 holds the outcome at two months, fac_dnr orders written at any
# time of the stay), the disease (a held-out disease would be told by its own column), and a copy of num_num_co
_SUPPORT2_NUMBERS = (
    "age", "num_co", "edu", "scoma", "hday", "sps", "meanbp", "wblc", "hrt", "resp", "temp", "pafi", "alb", "bili",
    "crea", "sod", "ph", "glucose", "bun", "urine", "adlp", "adls",
)  # fmt: skip
_SUPPORT2_FACTORS = ("sex", "race", "diabetes", "dementia", "ca", "income")

#: What both tables measure: our name and RHC's column.
_RHC_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "age": "num_age",
        "edu": "num_edu",
        "scoma": "num_scoma1",
        "meanbp": "num_meanbp1",
        "wblc": "num_wblc1",
        "hrt": "num_hrt1",
        "resp": "num_resp1",
        "temp": "num_temp1",
        "pafi": "num_pafi1",
        "alb": "num_alb1",
        "bili": "num_bili1",
        "crea": "num_crea1",
        "sod": "num_sod1",
        "ph": "num_ph1",
        "urine": "num_urin1",
        "adlp": "num_adld3p",
    }
)
_RHC_FACTORS: Mapping[str, str] = MappingProxyType(
    {"sex": "fac_sex", "race": "fac_race", "dementia": "fac_dementhx", "ca": "fac_ca"}
)
SHARED_NUMBERS, SHARED_FACTORS = tuple(_RHC_NUMBERS), tuple(_RHC_FACTORS)

#: RHC holds these normal values where nothing was measured (albumin 3.5 in 44 % of its rows).
_RHC_FILLED: Mapping[str, float] = MappingProxyType(
    {"alb": 3.5, "bili": 1.00976562, "pafi": 333.3125, "ph": 7.399998}
)


@dataclass(frozen=True)
class Patients:
    """Patients whose state at 30 days is known.

    Attributes:
        features: what is known of them at entry.
        died: bool `(N,)`, within 30 days.
        group: disease class of each, in small letters.
        person: age and sex as written in the file, which find the same person in the other table.
        unknown: how many rows were dropped because follow-up ended before day 30.
    """

    features: Features
    died: Tensor
    group: tuple[str, ...]
    person: tuple[tuple[float, str], ...]
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.died)

    def rows(self, index: Tensor) -> Patients:
        """Some of them."""
        at = index.tolist()
        return Patients(
            self.features.rows(index),
            self.died[index],
            tuple(self.group[i] for i in at),
            tuple(self.person[i] for i in at),
            self.unknown,
        )

    def unseen(self, seen: Patients) -> Patients:
        """Those of whom nobody among `seen` has the age and sex."""
        known = set(seen.person)
        return self.rows(
            torch.tensor([i for i, one in enumerate(self.person) if one not in known], dtype=torch.long)
        )


def support2(root: str | os.PathLike[str] | None = None) -> Patients:
    """SUPPORT2: 9,105 seriously ill adults of nine disease groups, on day 3 of the study (Knaus et al. 1995).

    Args:
        root: folder of `support2.csv[.gz]`; by default `icu` in the folder named by `DUBITO_DATA`.

    Raises:
        FileNotFoundError: if it is not there.
        TableError: if it is damaged or has other columns.
    """
    table = read_csv(find_csv(root, "icu", "support2"))
    numbers = {name: f"num_{name}" for name in _SUPPORT2_NUMBERS}
    factors = {name: f"fac_{name}" for name in _SUPPORT2_FACTORS}
    return _patients(table, numbers, factors, table.text("fac_dzclass"))


def rhc(root: str | os.PathLike[str] | None = None) -> Patients:
    """RHC: 5,735 intensive-care patients on day 1 (Connors et al. 1996), by the variables it shares with SUPPORT2.

    Names and levels are those of `support2`. Normal values put in where nothing was measured count as missing.
    Whoever has coma as first or second disease is of the group "coma".

    Args:
        root: folder of `rhc.csv[.gz]`; by default `icu` in the folder named by `DUBITO_DATA`.

    Raises:
        FileNotFoundError: if it is not there.
        TableError: if it is damaged or has other columns.
    """
    table = read_csv(find_csv(root, "icu", "rhc"))
    first, second = table.text("fac_cat1"), table.text("fac_cat2")
    groups = [COMA if "Coma" in pair else pair[0] for pair in zip(first, second, strict=True)]
    found = _patients(table, _RHC_NUMBERS, _RHC_FACTORS, groups)
    for name, value in _RHC_FILLED.items():
        column = found.features.numbers[name]
        column[(column - value).abs() < 1e-6] = torch.nan
    return found


def _patients(
    table: CsvTable,
    numbers: Mapping[str, str],
    factors: Mapping[str, str],
    groups: list[str] | tuple[str, ...],
) -> Patients:
    table.require(["event", "time", *numbers.values(), *factors.values()])
    died, known = _outcome(table)
    features = Features(
        {name: table.numbers(column) for name, column in numbers.items()},
        {name: tuple(word.lower() for word in table.text(column)) for name, column in factors.items()},
    )
    person = tuple(zip(features.numbers["age"].tolist(), features.factors["sex"], strict=True))
    whole = Patients(features, died, tuple(group.lower() for group in groups), person, int((~known).sum()))
    return whole.rows(known.nonzero().squeeze(1))


def _outcome(table: CsvTable) -> tuple[Tensor, Tensor]:
    """Who died within 30 days, and of whom that is known."""
    event, time = table.numbers("event"), table.numbers("time")
    wrong = ((event != 0) & (event != 1)) | time.isnan() | (time < 0)
    if bool(wrong.any()):
        line = int(wrong.nonzero()[0]) + 2
        raise TableError(
            f"{table.source}, line {line}: event must be 0 or 1 and time a number of days; got "
            f"{table.text('event')[line - 2]!r} and {table.text('time')[line - 2]!r}"
        )
    died = (event == 1) & (time <= DAYS)
    return died, died | (time >= DAYS)


def patients_csv(
    stem: str, root: str | os.PathLike[str] | None = None, folder: str = "mimic-iii"
) -> tuple[Features, Tensor]:
    """A table of one's own: one row a patient, every column a number, one of them called `label` (0 or 1).

    Nothing is prepared here; entries that are empty or NA are NaN.

    Args:
        stem: the file is `stem.csv[.gz]`.
        root: its folder; by default `folder` in the folder named by `DUBITO_DATA`.
        folder: see `root`.

    Returns:
        Features and labels, bool `(N,)`.

    Raises:
        FileNotFoundError: if it is not there.
        TableError: no column `label` or no other, labels other than 0 and 1, or what is no number.
    """
    table = read_csv(find_csv(root, folder, stem))
    table.require(["label"])
    numbers = {name: table.numbers(name) for name in table.columns if name != "label"}
    label = table.numbers("label")
    if not numbers or not bool(((label == 0) | (label == 1)).all()):
        raise TableError(
            f"{table.source} must have columns of features and a column label that is 0 or 1 in every row"
        )
    return Features(numbers, {}), label == 1
