"""`fit_process`: meta-learning of a process from many tasks."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from dubito.amortised.neural_processes import NeuralProcess
from dubito.amortised.objectives import OBJECTIVES, Objective, ProcessObjective
from dubito.amortised.process import BNNProcess
from dubito.amortised.tasks import Task, TaskBatch, gather_tasks, split_context
from dubito.gaussian_conditionals import PrecisionError
from dubito.training import NonFiniteError

Learner = BNNProcess | NeuralProcess

_KEPT_EVERY = 50  # steps between copies of the weights to fall back on


class TaskSource(Protocol):
    """Makes tasks on demand; the generators of `dubito.amortised.generators` are such."""

    def __call__(self, count: int, generator: torch.Generator) -> Sequence[Task]:
        """`count` fresh tasks."""


@dataclass
class ProcessFitResult:
    """What came of a training.

    Attributes:
        steps: taken.
        losses: of every step, in nats (a task, or a point where `per_point`).
        validation: (step, mean log predictive density a target) where there were validation tasks.
        best_step: whose weights the process has: of the best validation, else the last.
        seconds: wall time.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ProcessFitConfig:
    """Settings of `fit_process`.

    Attributes:
        objective: "pp-avi", "avi", "npml", "npvi", or a function like those of `dubito.amortised.objectives`.
        steps: optimiser steps.
        tasks_per_step: tasks in each.
        samples: draws of the weights for each task.
        context: bounds of the share of a task's points that becomes context; drawn for every task.
        batch_size: points of a task worked through at once; the gradient does not depend on it.
        per_point: divide by numbers of points, so that the learning rate suits tasks of any size.
        lr: Adam's learning rate at the start; it falls along a cosine to `final_lr`.
        final_lr: at the end.
        weight_decay: decoupled (AdamW), on the inference networks only.
        clip: largest norm of the gradient (None: any).
        validate_every: steps between validations.
        seed: of everything random.
    """

    objective: str | Objective = "pp-avi"
    steps: int = 2000
    tasks_per_step: int = 8
    samples: int = 8
    context: tuple[float, float] = (0.1, 0.5)
    batch_size: int | None = None
    per_point: bool = True
    lr: float = 5e-3
    final_lr: float = 5e-5
    weight_decay: float = 0.0
    clip: float | None = 10.0
    validate_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tasks_per_step", "samples", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if not 0 < self.final_lr <= self.lr:
            raise ValueError(f"lr={self.lr!r} and final_lr={self.final_lr!r}: 0 < final_lr <= lr is wanted")
        if not callable(self.objective) and self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective={self.objective!r} must be one of {', '.join(map(repr, OBJECTIVES))}, or a function"
            )

    def rate(self, step: int) -> float:
        """The learning rate after `step` steps, as a share of `lr`."""
        ratio = self.final_lr / self.lr
        return ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))


class ProcessFitOptions(TypedDict, total=False):
    """The fields of `ProcessFitConfig`, as keywords."""

    objective: str | Objective
    steps: int
    tasks_per_step: int
    samples: int
    context: tuple[float, float]
    batch_size: int | None
    per_point: bool
    lr: float
    final_lr: float
    weight_decay: float
    clip: float | None
    validate_every: int
    seed: int


def fit_process(
    process: BNNProcess | NeuralProcess,
    tasks: Sequence[Task] | TaskSource,
    validation: Sequence[Task] | None = None,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    config: ProcessFitConfig | None = None,
    say: Callable[[str], None] | None = None,
    **options: Unpack[ProcessFitOptions],
) -> ProcessFitResult:
    """Train a process in place: its prior, its inference networks and its noise.

    On a CPU one thread is fastest: the matrices are many and small (`torch.set_num_threads(1)`).

    Args:
        process: a `BNNProcess`, or a neural process, which has one objective of its own.
        tasks: a list of `(x, y)`, drawn from without replacement epoch by epoch, or a source of fresh ones.
        validation: tasks; the weights kept are those of the best mean log predictive density of their targets.
        optimizer: makes another optimiser from the parameters; its learning rate follows the same cosine.
        config: a `ProcessFitConfig`.
        say: called with lines of progress.
        options: any field of `ProcessFitConfig`, which see; they win over `config`.

    Raises:
        TypeError: an unknown option.
        ValueError: an empty task list, faulty tasks (named by index), settings outside what there is.
        NonFiniteError: a loss or a gradient that is NaN or infinite, or a posterior precision that is not positive
            definite; the process is back at its last good weights.
    """
    settings = replace(config if config is not None else ProcessFitConfig(), **options)
    fitting = _Fitting(process, _source(process, tasks), settings)
    made = (
        optimizer(process.parameters()) if optimizer else _adam(process, settings.lr, settings.weight_decay)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(made, settings.rate)
    check = None if validation is None else _Validation(process, validation, settings.context, settings.seed)
    result, started = ProcessFitResult(), time.perf_counter()
    steps = settings.steps
    for step in range(1, steps + 1):
        fitting.step(made, step)
        schedule.step()
        if check is not None and (step % settings.validate_every == 0 or step == steps):
            result.validation.append((step, check(step)))
        if say is not None and (step % max(1, steps // 10) == 0 or step == steps):
            recent = torch.stack(fitting.losses[-50:]).mean()
            say(f"step {step} of {steps}: loss {float(recent):.3f}")
    result.steps, result.seconds = steps, time.perf_counter() - started
    result.losses = torch.stack(fitting.losses).tolist()
    result.best_step = steps if check is None else check.restore()
    return result


class _Fitting:
    """One training: where it stands, and what to fall back on."""

    def __init__(self, process: Learner, source: TaskSource, settings: ProcessFitConfig) -> None:
        self.process, self.source, self.settings = process, source, settings
        stated = settings.objective
        self.objective: Objective = stated if callable(stated) else OBJECTIVES[stated]
        self.options: dict[str, Any] = {
            "samples": settings.samples,
            "batch_size": settings.batch_size,
            "per_point": settings.per_point,
            "disjoint": False,  # split here: they cannot but be
        }
        self.generator = torch.Generator().manual_seed(settings.seed)
        device = next(process.parameters()).device
        self.noise = torch.Generator(device).manual_seed(settings.seed + 1)
        self.losses: list[Tensor] = []
        self.good = copy.deepcopy(process.state_dict())

    def step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        process, clip = self.process, self.settings.clip
        tasks = self.source(self.settings.tasks_per_step, self.generator)
        batch = gather_tasks(tasks, process.dim_x, process.dim_y, process.labels)
        given, target = split_context(batch, self.settings.context, self.generator)
        device = self.noise.device
        optimizer.zero_grad()
        try:
            value = self._value(given.to(device), target.to(device))
        except PrecisionError as error:
            self._fall_back(step, str(error), error)
        value.loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for p in process.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
        if not bool((value.loss + norm).isfinite()):
            text = f"the loss is {float(value.loss.detach()):g} and its gradient's norm {float(norm):g}"
            self._fall_back(step, f"{text}: lower the learning rate, or standardise the tasks", None)
        if step % _KEPT_EVERY == 0:
            self.good = copy.deepcopy(process.state_dict())
        optimizer.step()
        self.losses.append(value.loss.detach())

    def _value(self, context: TaskBatch, target: TaskBatch) -> ProcessObjective:
        process, settings = self.process, self.settings
        if isinstance(process, BNNProcess):
            return self.objective(process, context, target, generator=self.noise, **self.options)
        return process.objective(context, target, settings.samples, settings.per_point, self.noise)

    def _fall_back(self, step: int, reason: str, error: Exception | None) -> Any:
        self.process.load_state_dict(self.good)
        raise NonFiniteError(
            f"step {step}: {reason}. The process is back at its weights of at most {_KEPT_EVERY} steps before"
        ) from error


class _Validation:
    """Mean log predictive density of validation targets, always under the same splits and draws."""

    def __init__(
        self, process: Learner, tasks: Sequence[Task], context: tuple[float, float], seed: int
    ) -> None:
        self.process, self.seed = process, seed
        batch = process.gather(tasks)
        cpu = torch.Generator(batch.x.device).manual_seed(seed)
        self.context, self.target = split_context(batch, context, cpu)
        self.best: tuple[float, int, dict[str, Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, step: int) -> float:
        noise = torch.Generator(self.context.x.device).manual_seed(self.seed)
        score = float(
            predictive_density(self.process, self.context, self.target, samples=32, generator=noise)
        )
        if self.best is None or score > self.best[0]:
            self.best = (score, step, copy.deepcopy(self.process.state_dict()))
        return score

    def restore(self) -> int:
        """Put the best weights back; the step they are of."""
        assert self.best is not None
        self.process.load_state_dict(self.best[2])
        return self.best[1]


@torch.no_grad()
def predictive_density(
    process: Learner,
    context: TaskBatch,
    target: TaskBatch,
    samples: int = 32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean over all targets of log mean_s p(y_n | x_n, W_s), in nats a point: a scalar."""
    if not isinstance(process, BNNProcess):
        return process.predictive_density(context, target, samples, generator)
    drawn = process.infer(context, samples, generator=generator)
    scores = process.log_likelihood(drawn.weights, target).logsumexp(0) - math.log(samples)
    return (scores * target.mask).sum() / target.mask.sum()


def _source(process: Learner, tasks: Sequence[Task] | TaskSource) -> TaskSource:
    """A list as a source: shuffled anew whenever it is used up."""
    if callable(tasks):
        return tasks
    given = list(tasks)
    gather_tasks(given, process.dim_x, process.dim_y, process.labels)  # complains before anything is trained

    def endless(generator: torch.Generator) -> Iterable[Task]:
        while True:
            yield from (given[i] for i in torch.randperm(len(given), generator=generator).tolist())

    stream: list[Any] = []

    def source(count: int, generator: torch.Generator) -> Sequence[Task]:
        if not stream:
            stream.append(iter(endless(generator)))
        return list(islice(stream[0], count))

    return source


def _adam(process: Learner, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    decayed = process.inference if isinstance(process, BNNProcess) else process
    inference = list(decayed.parameters())
    known = {id(p) for p in inference}
    rest = [p for p in process.parameters() if id(p) not in known and p.requires_grad]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": inference, "weight_decay": weight_decay}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr)
