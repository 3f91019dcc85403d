"""What a training run gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dubito.diagnostics import Summary


@dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps taken since the beginning.
        loss: mean training loss over the epoch's examples, nats an example.
        nll: its likelihood part, nats an example.
        kl: KL(q || prior) in nats, mean over the epoch's steps; 0 where the objective has none.
        beta: the weight of the KL in the last step.
        lr: the learning rate of the optimizer's first group after the epoch.
        seconds: wall time, validation included.
        validation_nll: nats an example, or None without validation data.
    """

    epoch: int
    step: int
    loss: float
    nll: float
    kl: float
    beta: float
    lr: float
    seconds: float
    validation_nll: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)


@dataclass
class FitResult:
    """The outcome of `dubito.fit`.

    Attributes:
        model: the module that was trained (in place).
        history: one record an epoch, earlier runs of a resumed training included.
        n_data: N of the objective.
        steps: optimizer steps taken in all.
        best_epoch: the epoch of the lowest validation NLL, whose weights the model ends with (None without
            validation).
        best_validation_nll: that NLL, nats an example.
        stopped_early: whether `patience` ended the run.
        resumed_from: the step at which the run was taken up again, or None.
        checkpoint: the last checkpoint written, or None.
        target_shift: mean of the training targets that was subtracted, or None.
        target_scale: standard deviation that was divided by, or None.
        summary: the posterior at the end (`dubito.diagnostics.summary`); None for plain modules.
        warnings: what the diagnostics found wrong, in words.
    """

    model: nn.Module
    history: list[EpochRecord] = field(default_factory=list)
    n_data: int = 0
    steps: int = 0
    best_epoch: int | None = None
    best_validation_nll: float | None = None
    stopped_early: bool = False
    resumed_from: int | None = None
    checkpoint: Path | None = None
    target_shift: Tensor | None = None
    target_scale: Tensor | None = None
    summary: Summary | None = None
    warnings: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """Wall time of all epochs together."""
        return sum(record.seconds for record in self.history)

    def column(self, name: str) -> list[Any]:
        """One quantity over the epochs: `result.column("nll")`.

        Raises:
            AttributeError: records have no such quantity.
        """
        return [getattr(record, name) for record in self.history]

    def __str__(self) -> str:
        if not self.history:
            return "FitResult: no epoch was completed"
        last = self.history[-1]
        lines = [
            f"{len(self.history)} epochs, {self.steps} steps, {self.seconds:.1f} s, N = {self.n_data}"
            + (f" (stopped early; best epoch {self.best_epoch})" if self.stopped_early else ""),
            f"loss {last.loss:.4f} nats an example"
            + (f" = NLL {last.nll:.4f} + beta {last.beta:g} · KL {last.kl:.1f} / N" if last.kl else ""),
        ]
        if self.best_validation_nll is not None:
            lines.append(f"validation NLL {self.best_validation_nll:.4f} at epoch {self.best_epoch}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])
