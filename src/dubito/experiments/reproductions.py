"""The reproductions by name; a further system adds one entry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dubito.experiments.bbb import BBB
from dubito.experiments.cvp import CVP
from dubito.experiments.ibvi import IBVI
from dubito.experiments.reproduction import Reproduction, UnknownReproductionError
from dubito.experiments.singular import SINGULAR

REPRODUCTIONS: Mapping[str, Reproduction] = MappingProxyType(
    {entry.name: entry for entry in (BBB, IBVI, SINGULAR, CVP)}
)


def find_reproduction(name: str) -> Reproduction:
    """The reproduction of that name.

    Raises:
        UnknownReproductionError: listing those there are.
    """
    if name not in REPRODUCTIONS:
        raise UnknownReproductionError(
            f"there is no reproduction {name!r}; there are {', '.join(REPRODUCTIONS)}"
        )
    return REPRODUCTIONS[name]
