"""A progress bar that is silent where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from torch import Tensor


class ProgressBar:
    """Epoch, step, loss, NLL and KL while training; shows nothing unless `shown` and on a terminal."""

    def __init__(self, epochs: int, batches: int | None, shown: bool) -> None:
        self._epochs, self._batches = epochs, batches
        self._shown = shown and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            total = None if self._batches is None else self._batches * self._epochs
            self._task = self._bar.add_task("fit", total=total, epoch=f"0/{self._epochs}", figures="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, batches: int, parts: Tensor, validation: float | None) -> None:
        """Show one step.

        Args:
            epoch: counted from 0.
            batches: batches seen since the beginning.
            parts: loss, NLL, KL; read from the device at most ten times a second.
            validation: the last validation NLL.
        """
        if self._bar is None or time.monotonic() - self._last < 0.1:
            return
        self._last = time.monotonic()
        loss, nll, kl = parts.tolist()
        figures = f"loss {loss:.4f}  NLL {nll:.4f}  KL {kl:.4g}"
        if validation is not None:
            figures += f"  validation NLL {validation:.4f}"
        self._bar.update(self._task, completed=batches, epoch=f"{epoch + 1}/{self._epochs}", figures=figures)
