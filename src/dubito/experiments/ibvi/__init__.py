"""Implicit-bias variational inference: what has to be shown by experiment."""

from __future__ import annotations

from types import MappingProxyType

from dubito.experiments.ibvi.toys import toys_part
from dubito.experiments.ibvi.transfer import mup_part
from dubito.experiments.ibvi.verdict import comparison_part
from dubito.experiments.reproduction import Part, Reproduction

IBVI = Reproduction(
    "ibvi",
    "Variational inference by implicit bias",
    "Networks with a low-rank covariance in two layers, trained by the expected loss alone from a prior: what SGD does "
    "to them, beside the rivals of the paper.",
    MappingProxyType(
        {
            "comparison": Part(
                "nine methods on MNIST and Fashion-MNIST, with LeNet-5 and a small ResNet", comparison_part
            ),
            "mup": Part("transfer of the learning rate between widths", mup_part),
            "toys": Part("regression on three clusters, and two moons", toys_part),
        }
    ),
)

__all__ = ["IBVI"]
