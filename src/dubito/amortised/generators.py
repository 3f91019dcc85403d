"""Sources of tasks: families of functions, images as regression, and fields of weather.

Each is called with a number of tasks and a generator, and gives that many `(x, y)`; see `dubito.amortised.fit_process`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dubito.amortised.tasks import Task

Kernel = Literal["rbf", "matern12", "matern32", "matern52", "periodic"]


def _uniform(shape: Sequence[int], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class FunctionTasks:
    """One-dimensional functions seen with noise at random inputs.

    Attributes:
        low, high: inputs are uniform between these.
        points: smallest and largest number of points of a task.
        noise: standard deviation of the outcomes around the function.
    """

    low: float = -4.0
    high: float = 4.0
    points: tuple[int, int] = (20, 60)
    noise: float = 0.05

    def __post_init__(self) -> None:
        if not (self.low < self.high and 1 <= self.points[0] <= self.points[1] and self.noise >= 0):
            raise ValueError(f"{self!r}: low < high, 1 <= points[0] <= points[1] and noise >= 0 are wanted")

    def __call__(self, count: int, generator: torch.Generator) -> list[Task]:
        """`count` fresh tasks, x (n, 1) and y (n, 1) in float64."""
        tasks: list[Task] = []
        for _ in range(count):
            low, high = self.points
            size = int(torch.randint(low, high + 1, (), generator=generator))
            x = _uniform((size, 1), self.low, self.high, generator)
            clean = self.function(generator)(x)
            noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
            tasks.append((x, clean + self.noise * noise))
        return tasks

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """A function drawn at random, of inputs (n, 1); one whose values are drawn jointly is good for one call."""
        raise NotImplementedError


@dataclass(frozen=True)
class SineTasks(FunctionTasks):
    """a·sin(w·x + c): amplitude 0.5–1.5, frequency 0.8–1.2, any phase."""

    amplitude: tuple[float, float] = (0.5, 1.5)
    frequency: tuple[float, float] = (0.8, 1.2)

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """See `FunctionTasks.function`."""
        a = _uniform((1,), *self.amplitude, generator)
        w = _uniform((1,), *self.frequency, generator)
        c = _uniform((1,), 0.0, 2 * math.pi, generator)
        return lambda x: a * torch.sin(w * x + c)


@dataclass(frozen=True)
class SawtoothTasks(FunctionTasks):
    """Straight rises of one period, then a fall at once: ((x + shift) mod period) - period/2, any shift."""

    period: float = 3.0

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """See `FunctionTasks.function`."""
        shift = _uniform((1,), 0.0, self.period, generator)
        return lambda x: torch.remainder(x + shift, self.period) - self.period / 2


@dataclass(frozen=True)
class GaussianProcessTasks(FunctionTasks):
    """Draws of a Gaussian process.

    Attributes:
        kernel: "rbf", "matern12", "matern32", "matern52" or "periodic" (period 2).
        lengthscale: of the kernel.
        variance: of the function at a point.
    """

    kernel: Kernel = "rbf"
    lengthscale: float = 1.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel not in get_args(Kernel):
            raise ValueError(
                f"kernel={self.kernel!r} must be one of {', '.join(map(repr, get_args(Kernel)))}"
            )
        if not (self.lengthscale > 0 and self.variance > 0):
            raise ValueError(
                f"lengthscale={self.lengthscale} and variance={self.variance} must be above zero"
            )

    def covariance(self, x: Tensor) -> Tensor:
        """The kernel between all inputs (n, d): (n, n)."""
        distance = torch.cdist(x, x) / self.lengthscale
        if self.kernel == "rbf":
            value = torch.exp(-0.5 * distance.square())
        elif self.kernel == "matern12":
            value = torch.exp(-distance)
        elif self.kernel == "matern32":
            value = (1 + math.sqrt(3) * distance) * torch.exp(-math.sqrt(3) * distance)
        elif self.kernel == "matern52":
            scaled = math.sqrt(5) * distance
            value = (1 + scaled + scaled.square() / 3) * torch.exp(-scaled)
        else:
            value = torch.exp(-2 * (torch.sin(math.pi * torch.cdist(x, x) / 2) / self.lengthscale).square())
        return self.variance * value

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """See `FunctionTasks.function`."""

        def drawn(x: Tensor) -> Tensor:
            # by eigenvalues: smooth kernels are singular to rounding, and a Cholesky factor would need jitter
            values, vectors = torch.linalg.eigh(self.covariance(x))
            eps = torch.randn(len(x), 1, generator=generator, dtype=x.dtype)
            value: Tensor = vectors @ (values.clamp(min=0.0).sqrt().unsqueeze(-1) * eps)
            return value

        return drawn


@dataclass(frozen=True)
class HeavisideTasks(GaussianProcessTasks):
    """Signs of Gaussian process draws: functions that jump between -1 and 1."""

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """See `FunctionTasks.function`."""
        smooth = super().function(generator)
        return lambda x: torch.sign(smooth(x))


@dataclass(frozen=True)
class NetworkTasks(FunctionTasks):
    """Draws of a Bayesian network at the fan-in scale: all weights and biases N(0, 1/(inputs + 1)).

    Attributes:
        hidden: widths of the hidden layers.
        activation: "tanh" or "relu".
    """

    hidden: tuple[int, ...] = (20, 20)
    activation: Literal["tanh", "relu"] = "tanh"

    def function(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """See `FunctionTasks.function`."""
        widths = (1, *self.hidden, 1)
        weights = [
            torch.randn(out, into + 1, generator=generator, dtype=torch.float64) * (into + 1) ** -0.5
            for into, out in itertools.pairwise(widths)
        ]
        act = torch.tanh if self.activation == "tanh" else torch.relu

        def evaluated(x: Tensor) -> Tensor:
            for index, weight in enumerate(weights):
                x = (act(x) if index else x) @ weight[:, :-1].mT + weight[:, -1]
            return x

        return evaluated


@dataclass(frozen=True)
class ImageTasks:
    """Images as regression from a pixel's place to its value.

    Attributes:
        images: (N, height, width) or (N, channels, height, width), values in [0, 1].
        points: smallest and largest number of pixels of a task; None takes all.
    """

    images: Tensor
    points: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.images.ndim not in (3, 4) or not len(self.images):
            raise ValueError(
                f"images have shape {tuple(self.images.shape)}, but (N, height, width) or (N, channels, height, width) "
                "is wanted"
            )

    def __call__(self, count: int, generator: torch.Generator) -> list[Task]:
        """`count` tasks: x (n, 2) in [-1, 1], rows first; y (n, channels)."""
        tasks: list[Task] = []
        for index in torch.randint(len(self.images), (count,), generator=generator).tolist():
            x, y = self.whole(index)
            if self.points is not None:
                low, high = self.points
                size = min(int(torch.randint(low, high + 1, (), generator=generator)), len(x))
                chosen = torch.randperm(len(x), generator=generator)[:size]
                x, y = x[chosen], y[chosen]
            tasks.append((x, y))
        return tasks

    def whole(self, index: int) -> tuple[Tensor, Tensor]:
        """All pixels of one image, row by row."""
        image = self.images[index]
        image = image.unsqueeze(0) if image.ndim == 2 else image
        return pixel_grid(*image.shape[-2:]), image.flatten(1).mT.to(torch.float64)


def pixel_grid(height: int, width: int) -> Tensor:
    """Places of pixels, (height · width, 2) in [-1, 1], row by row; any resolution covers the same square."""
    rows, columns = (torch.linspace(-1, 1, 2 * n + 1, dtype=torch.float64)[1::2] for n in (height, width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)


@dataclass(frozen=True)
class FieldTasks:
    """Patches of a field over time and a map, such as precipitation: from (time, latitude, longitude) to a value.

    Attributes:
        values: (times, rows, columns); NaN where there is none.
        patch: rows and columns of a task's patch.
        times: instants of a task, one after the other.
        points: largest number of points of a task, chosen at random.
        within: instants that may be used, `(first, last + 1)`; None all: to hold tasks out by time.
    """

    values: Tensor
    patch: tuple[int, int] = (16, 16)
    times: int = 1
    points: int = 128
    within: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 3:
            raise ValueError(
                f"values have shape {tuple(self.values.shape)}, but (times, rows, columns) is wanted"
            )
        first, last = self.within or (0, len(self.values))
        if not 0 <= first <= last - self.times or last > len(self.values):
            raise ValueError(
                f"within={self.within!r} holds fewer than {self.times} of {len(self.values)} instants"
            )
        if any(size > whole for size, whole in zip(self.patch, self.values.shape[1:], strict=True)):
            raise ValueError(f"patch={self.patch!r} does not fit a field of {tuple(self.values.shape[1:])}")

    def __call__(self, count: int, generator: torch.Generator) -> list[Task]:
        """`count` tasks of points that have values: x (n, 3) in [-1, 1] within the patch; y (n, 1)."""
        tasks: list[Task] = []
        tries = 0
        while len(tasks) < count:
            tries += 1
            if tries > 1000 * count:
                raise ValueError(
                    "patches with at least two values were not found: the field is almost all NaN"
                )
            task = self._drawn(generator)
            if task is not None:
                tasks.append(task)
        return tasks

    def _drawn(self, generator: torch.Generator) -> Task | None:
        first, last = self.within or (0, len(self.values))
        sizes = (self.times, *self.patch)
        limits = (last - first, *self.values.shape[1:])
        starts = [
            int(torch.randint(limit - size + 1, (), generator=generator))
            for limit, size in zip(limits, sizes, strict=True)
        ]
        starts[0] += first
        part = self.values[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
        axes = [torch.linspace(-1, 1, 2 * n + 1, dtype=torch.float64)[1::2] for n in sizes]
        x = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
        y = part.reshape(-1, 1).to(torch.float64)
        there = y.squeeze(-1).isfinite().nonzero().squeeze(-1)
        if len(there) < 2:
            return None
        chosen = there[torch.randperm(len(there), generator=generator)[: self.points]]
        return x[chosen], y[chosen]
