"""Reader of comma-separated tables, plain or gzip-compressed, with errors that name file, column and line."""

from __future__ import annotations

import csv
import difflib
import gzip
import io
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ENVIRONMENT = "DUBITO_DATA"
NOT_GIVEN = frozenset({"", "NA", "NaN", "nan"})


class TableError(ValueError):
    """A table that is damaged, or is not the one expected; the message names the file and the place."""


@dataclass(frozen=True)
class CsvTable:
    """A table as text, by column.

    Attributes:
        source: the file, for messages.
        columns: by name in the file's order; all of one length.
    """

    source: str
    columns: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def require(self, names: Sequence[str]) -> None:
        """Check that the columns are there.

        Raises:
            TableError: naming those that are not, and the nearest that are.
        """
        missing = [name for name in names if name not in self.columns]
        if missing:
            near = (
                difflib.get_close_matches(missing[0], self.columns, n=3, cutoff=0.4) or list(self.columns)[:8]
            )
            raise TableError(
                f"{self.source} has no column {', '.join(map(repr, missing))}; the nearest it has are "
                f"{', '.join(map(repr, near))}. Is it another file, or one with other headings?"
            )

    def text(self, name: str) -> tuple[str, ...]:
        """A column as it stands in the file."""
        self.require([name])
        return self.columns[name]

    def numbers(self, name: str) -> Tensor:
        """A column as float64, shape `(N,)`; what is not given (empty, NA, NaN) is NaN.

        Raises:
            TableError: for an entry that is no finite number, with its line.
        """
        values = []
        for row, entry in enumerate(self.text(name)):
            try:
                value = math.nan if entry in NOT_GIVEN else float(entry)
            except ValueError:
                value = math.inf
            if math.isinf(value):
                raise TableError(f"{self.source}, line {row + 2}, column {name!r}: {entry!r} is not a number")
            values.append(value)
        return torch.tensor(values, dtype=torch.float64)


def read_csv(path: str | os.PathLike[str]) -> CsvTable:
    """Read a comma-separated file whose first line holds the columns' names.

    Raises:
        FileNotFoundError: if there is no such file.
        TableError: a broken gzip file, no UTF-8, no rows, headings that repeat, or a line cut short.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise TableError(f"{path}: broken gzip file ({error}); fetch it again") from error
    try:
        lines = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True))
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise TableError(f"{path} is not a comma-separated table: {error}; fetch it again") from error
    rows = [line for line in lines[1:] if line]
    if not rows:
        raise TableError(f"{path} holds no rows under its headings; fetch it again")
    names = lines[0]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableError(f"{path} has two columns called {twice!r}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise TableError(
                f"{path}, line {number}: {len(row)} entries under {len(names)} headings; the file may have been "
                "cut short: fetch it again"
            )
    return CsvTable(str(path), dict(zip(names, zip(*rows, strict=True), strict=True)))


def find_csv(root: str | os.PathLike[str] | None, folder: str, stem: str) -> Path:
    """The file `stem.csv.gz` or `stem.csv` in `root`, or in `folder` of the folder that `DUBITO_DATA` names.

    Raises:
        FileNotFoundError: naming what was looked for, and how to say where it is.
    """
    parent = os.environ.get(ENVIRONMENT)
    if root is None and not parent:
        raise FileNotFoundError(
            f"{stem}.csv is read from a file: pass root=, the folder that holds {stem}.csv.gz (or {stem}.csv), or set "
            f"the environment variable {ENVIRONMENT} to the folder that holds {folder}/"
        )
    place = Path(root) if root is not None else Path(str(parent)) / folder
    for name in (f"{stem}.csv.gz", f"{stem}.csv"):
        if (place / name).is_file():
            return place / name
    raise FileNotFoundError(f"neither {stem}.csv.gz nor {stem}.csv in {place}")
