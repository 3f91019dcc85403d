"""Calibrated variance propagation: one pass against many, on four networks trained by IVON."""

from __future__ import annotations

from types import MappingProxyType

from dubito.experiments.cvp.parts import part_runner
from dubito.experiments.reproduction import Part, Reproduction

CVP = Reproduction(
    "cvp",
    "Calibrated variance propagation",
    "Uncertainty in one pass: means and variances propagated through unmodified networks whose posteriors IVON has "
    "found, calibrated on 500 examples, against the mean network, up to 400 draws of the weights, and first-order "
    "propagation.",
    MappingProxyType(
        {
            "resnet": Part("a small ResNet on Fashion-MNIST; digits are unknown", part_runner("resnet")),
            "vit": Part(
                "a small vision Transformer on Fashion-MNIST; digits are unknown", part_runner("vit")
            ),
            "bert": Part(
                "a small BERT on sentences about films; tweets and editorials are unknown",
                part_runner("bert"),
            ),
            "pairs": Part(
                "do two handwritten digits agree? Pairs of clothes are unknown", part_runner("pairs")
            ),
        }
    ),
    seeds=3,
)

__all__ = ["CVP"]
