"""Where a run is: what a checkpoint holds besides weights, optimizer and random states."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.training.result import EpochRecord
from dubito.weights.family import DubitoWarning


@dataclass
class Position:
    """Where a run is.

    Attributes:
        epoch: epochs completed.
        batch: batches used of the current one.
        step: optimizer steps taken in all.
        sums: over the current epoch: loss, NLL (times examples), KL (times batches), examples, batches.
        history: completed epochs.
        best_nll: lowest validation NLL so far.
        best_epoch: its epoch, counted from 1.
        last_validation: the latest validation NLL.
        waited: epochs since the best.
        stopped_early: whether patience has run out.
        random: random states of all processes at the moment of the checkpoint.
        epoch_random: those at the beginning of the current epoch, where one is under way.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    sums: Tensor | None = None
    history: list[EpochRecord] = field(default_factory=list)
    best_nll: float | None = None
    best_epoch: int | None = None
    last_validation: float | None = None
    waited: int = 0
    stopped_early: bool = False
    random: list[dict[str, Any]] | None = None
    epoch_random: list[dict[str, Any]] | None = None

    def record(
        self, *, offset: float, beta: float, lr: float, seconds: float, validation: float | None
    ) -> EpochRecord:
        """The current epoch in figures; `offset` is added to loss and NLL (the targets' own units)."""
        assert self.sums is not None
        loss, nll, kl, size, batches = self.sums.tolist()
        return EpochRecord(
            epoch=self.epoch + 1,
            step=self.step,
            loss=loss / size + offset,
            nll=nll / size + offset,
            kl=kl / batches,
            beta=beta,
            lr=lr,
            seconds=seconds,
            validation_nll=validation,
        )

    def as_tree(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        tree = dict(vars(self))
        tree["history"] = [record.as_dict() for record in self.history]
        return tree

    @staticmethod
    def from_tree(tree: Mapping[str, Any], device: torch.device) -> Position:
        """The inverse of `as_tree`; running sums go to `device`."""
        values = dict(tree)
        values["history"] = [EpochRecord(**record) for record in values["history"]]
        if values["sums"] is not None:
            values["sums"] = values["sums"].to(device)
        return Position(**values)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of settings that differ between a checkpoint and the run that goes on from it."""
    found = [f"{k} was {saved[k]!r}, now {v!r}" for k, v in now.items() if k in saved and saved[k] != v]
    if not found:
        return
    another = saved.get("optimizer") != now.get("optimizer")
    warnings.warn(
        f"the resumed run differs from the checkpoint: {'; '.join(found)}. The new settings are used, "
        + (
            "and the optimizer, being of another kind, begins anew"
            if another
            else "but the optimizer goes on with the learning rate and decay it had"
        ),
        DubitoWarning,
        stacklevel=6,
    )
