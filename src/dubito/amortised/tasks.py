"""Tasks: many data sets of one kind, as lists and as padded batches.

A task is `(x, y)` with `x` of shape (n, dim_x) and `y` of shape (n, dim_y), or integer labels (n,) for a categorical
likelihood; `(x, y, observed)` says by booleans of y's shape which outcomes were seen. Tasks of unequal length are
padded to one tensor and carry masks; a padded point takes no part in anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Task = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TaskBatch:
    """Tasks padded to the longest.

    Attributes:
        x: inputs, (tasks, points, dim_x).
        y: outcomes, (tasks, points, dim_y), or labels (tasks, points); unseen ones are 0.
        mask: which points exist, (tasks, points).
        observed: which outcomes were seen, (tasks, points, dim_y) (labels: one column); False at padded points.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    observed: Tensor

    def __len__(self) -> int:
        return len(self.x)

    @property
    def points(self) -> int:
        """Points a task, padding included."""
        return self.x.shape[1]

    @property
    def counts(self) -> Tensor:
        """Points of each task, (tasks,)."""
        return self.mask.sum(-1)

    @property
    def complete(self) -> bool:
        """Whether every outcome of every point was seen."""
        return bool((self.observed | ~self.mask.unsqueeze(-1)).all())

    def chunks(self, size: int | None) -> list[TaskBatch]:
        """The points in pieces of at most `size` (None: one piece)."""
        if size is None or size >= self.points:
            return [self]
        return [self.part(slice(start, start + size)) for start in range(0, self.points, size)]

    def part(self, points: slice) -> TaskBatch:
        """Some of the points of every task."""
        at = (slice(None), points)
        return TaskBatch(self.x[at], self.y[at], self.mask[at], self.observed[at])

    def to(self, device: torch.device | str) -> TaskBatch:
        """The same on another device."""
        return TaskBatch(*(t.to(device) for t in (self.x, self.y, self.mask, self.observed)))

    def _gather(self, index: Tensor, mask: Tensor) -> TaskBatch:
        """The points at `index` (tasks, points); those outside `mask` become padding."""

        def take(values: Tensor) -> Tensor:
            at = index.reshape(*index.shape, *(1 for _ in values.shape[2:])).expand(
                *index.shape, *values.shape[2:]
            )
            return values.gather(1, at)

        kept = mask.unsqueeze(-1)
        y = take(self.y)
        return TaskBatch(
            take(self.x) * kept,
            y * (kept if y.ndim == 3 else mask),
            mask,
            take(self.observed) & kept,
        )

    def joined(self, other: TaskBatch) -> TaskBatch:
        """The points of both, task by task."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return TaskBatch(*(torch.cat(pair, dim=1) for pair in pairs))


def gather_tasks(tasks: Sequence[Task], dim_x: int, dim_y: int, labels: bool = False) -> TaskBatch:
    """Check tasks and pad them to one batch.

    Args:
        tasks: `(x, y)` or `(x, y, observed)`; see the module.
        dim_x: features of an input.
        dim_y: outcomes a point, or the number of classes where `labels`.
        labels: whether y are integer labels.

    Raises:
        TypeError: something that is no pair of tensors.
        ValueError: no tasks, lengths that differ, wrong widths, NaN or infinite values, labels outside the classes;
            the message names the task by its index.
    """
    if not len(tasks):
        raise ValueError("tasks is empty: give at least one (x, y)")
    rows = [_checked(index, task, dim_x, dim_y, labels) for index, task in enumerate(tasks)]
    longest = max(len(x) for x, _, _ in rows)
    padded: list[list[Tensor]] = [[], [], [], []]
    for x, y, seen in rows:
        extra = longest - len(x)
        mask = torch.arange(longest, device=x.device) < len(x)
        for store, value in zip(
            padded, (_pad(x, extra), _pad(y, extra), mask, _pad(seen, extra)), strict=True
        ):
            store.append(value)
    x, y, mask, seen = (torch.stack(values) for values in padded)
    return TaskBatch(x, y, mask, seen)


def split_context(
    batch: TaskBatch, context: tuple[float, float], generator: torch.Generator | None = None
) -> tuple[TaskBatch, TaskBatch]:
    """Split every task at random into context and target, which share no point.

    Args:
        batch: the tasks.
        context: the share of a task's points that becomes context is drawn, for each task, uniformly between these.
        generator: source of randomness.

    Returns:
        Context and target. At least one point of every task is a target.

    Raises:
        ValueError: a share outside [0, 1) or in the wrong order.
    """
    low, high = context
    if not 0 <= low <= high < 1:
        raise ValueError(
            f"context={context!r} must be two shares 0 <= low <= high < 1 of a task's points, such as (0.1, 0.5)"
        )
    place = {"device": batch.x.device, "generator": generator}
    share = low + (high - low) * torch.rand(len(batch), dtype=torch.float64, **place)  # type: ignore[arg-type]
    counts = batch.counts
    given = (share * counts).floor().long().clamp(max=counts - 1).clamp(min=0)
    keys = torch.rand(batch.mask.shape, **place).masked_fill(~batch.mask, 2.0)  # type: ignore[arg-type]
    order = keys.argsort(dim=1)
    steps = torch.arange(batch.points, device=batch.x.device)
    longest, rest = int(given.max()), int((counts - given).max())
    first = batch._gather(order[:, :longest], steps[:longest] < given.unsqueeze(1))
    at = (given.unsqueeze(1) + steps[:rest]).clamp(max=batch.points - 1)
    second = batch._gather(order.gather(1, at), steps[:rest] < (counts - given).unsqueeze(1))
    return first, second


def check_disjoint(context: TaskBatch, target: TaskBatch) -> None:
    """Refuse targets that stand in the context too.

    Raises:
        ValueError: naming the first such task and how many of its targets are in its context.
    """
    y_context, y_target = (b.y if b.y.ndim == 3 else b.y.unsqueeze(-1) for b in (context, target))
    same = (context.x.unsqueeze(1) == target.x.unsqueeze(2)).all(-1)
    same &= (y_context.unsqueeze(1) == y_target.unsqueeze(2)).all(-1)
    same &= context.mask.unsqueeze(1) & target.mask.unsqueeze(2)
    shared = same.any(-1).sum(-1)
    if bool(shared.any()):
        index = int(shared.nonzero()[0])
        raise ValueError(
            f"task {index}: {int(shared[index])} of its targets stand in its context as well, but this objective asks "
            "for disjoint sets: split the task (split_context), or pass disjoint=False to count them twice knowingly"
        )


def _checked(index: int, task: Task, dim_x: int, dim_y: int, labels: bool) -> tuple[Tensor, Tensor, Tensor]:
    if (
        not isinstance(task, tuple | list)
        or len(task) not in (2, 3)
        or not all(isinstance(t, Tensor) for t in task)
    ):
        raise TypeError(
            f"task {index} is {type(task).__name__}, but a task is (x, y) or (x, y, observed): tensors"
        )
    x, y = task[0], task[1]
    if x.ndim == 1 and dim_x == 1:
        x = x.unsqueeze(-1)
    if y.ndim == 1 and dim_y == 1 and not labels:
        y = y.unsqueeze(-1)
    expected = "(n,)" if labels else f"(n, {dim_y})"
    if (
        x.ndim != 2
        or x.shape[1] != dim_x
        or y.ndim != (1 if labels else 2)
        or (not labels and y.shape[1] != dim_y)
    ):
        raise ValueError(
            f"task {index}: x has shape {tuple(task[0].shape)} and y {tuple(task[1].shape)}, but this process takes "
            f"x of (n, {dim_x}) and y of {expected}"
        )
    if len(x) != len(y):
        raise ValueError(f"task {index}: x has {len(x)} points and y {len(y)}; every point needs both")
    if labels and y.is_floating_point():
        raise TypeError(f"task {index}: y holds {y.dtype}, but labels are integers from 0 to {dim_y - 1}")
    columns = y.unsqueeze(-1) if labels else y
    seen = task[2].bool() if len(task) == 3 else torch.ones_like(columns, dtype=torch.bool)
    if seen.ndim == 1:
        seen = seen.unsqueeze(-1)
    if seen.shape != columns.shape:
        raise ValueError(
            f"task {index}: observed has shape {tuple(seen.shape)}, but y has {tuple(columns.shape)}"
        )
    _check_values(index, x, columns, seen, dim_y, labels)
    y = (columns * seen).squeeze(-1) if labels else columns.masked_fill(~seen, 0.0).to(torch.float64)
    return x.to(torch.float64), y, seen


def _check_values(index: int, x: Tensor, y: Tensor, seen: Tensor, dim_y: int, labels: bool) -> None:
    if not bool(x.isfinite().all()):
        raise ValueError(
            f"task {index}: x holds NaN or infinity at point {int((~x.isfinite()).nonzero()[0, 0])}"
        )
    if labels:
        if bool((((y < 0) | (y >= dim_y)) & seen).any()):
            raise ValueError(f"task {index}: y holds labels outside 0 … {dim_y - 1}")
    elif bool((~y.isfinite() & seen).any()):
        at = int((~y.isfinite() & seen).nonzero()[0, 0])
        raise ValueError(
            f"task {index}: y holds NaN or infinity at point {at}; of outcomes that were not seen give "
            "(x, y, observed) with observed False there"
        )


def _pad(values: Tensor, extra: int) -> Tensor:
    return torch.cat((values, values.new_zeros(extra, *values.shape[1:]))) if extra else values
