"""Everything about a training run that is not the model or the data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from torch.optim import Optimizer

Objective = Literal["elbo", "expected_loss"]
Precision = Literal["no", "bf16", "fp16"]
SchedulerFactory = Callable[[Optimizer], Any]


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How to train. Every field is also a keyword argument of `dubito.fit`, which wins over the config's.

    Attributes:
        epochs: passes over the training data, counted from the beginning also when a run is resumed.
        objective: "elbo": mean NLL + beta · KL / N. "expected_loss": mean NLL alone, the implicit-bias
            objective. Modules without random weights have no KL and are trained by their NLL either way.
        n_data: N, the number of training examples. None: counted from the loader.
        beta: weight of the KL, a number or a function of the optimizer step counted from 0, such as
            `dubito.objectives.KLWarmup`.
        samples: draws of the weights a training step.
        lr: learning rate, where fit makes the optimizer or its parameter groups. None: 1e-3 for the default Adam,
            1e-2 for the default SGD, the function's own where `optimizer` is a function.
        weight_decay: of the default optimizer; variational parameters of spread never get any.
        scheduler: a function from an optimizer to a `torch.optim.lr_scheduler`.
        scheduler_interval: whether the scheduler steps after each "step" or each "epoch".
            `ReduceLROnPlateau` is given the validation NLL (the training loss where there is none).
        clip_norm: largest Euclidean norm of the gradient; None leaves it alone.
        accumulation: batches whose gradients are averaged into one step.
        precision: "no" (as the parameters are), "bf16" or "fp16": accelerate's mixed precision.
        patience: stop when the validation NLL has not improved for this many epochs. None: never.
        min_delta: the least drop of validation NLL, in nats, that counts as an improvement.
        validation_samples: draws in the validation's predictive; 0 is one pass at the posterior mean. The
            same noise every epoch, so that epochs are compared and not draws. Modules without random weights
            take one pass.
        restore_best: end with the weights of the best validation NLL rather than the last ones.
        standardize_targets: train on (y − mean) / sd of the training targets, and tell the model, whose
            predictive undoes it. NLLs reported are of the targets as given, so they can be compared.
        checkpoint_dir: folder of `last.safetensors` (everything needed to go on) and `best.safetensors`. Weights
            alone: `model.load_state_dict(dubito.training.load_checkpoint(path)["weights"]["model"])`.
        checkpoint_every: steps between checkpoints besides the one at the end of each epoch. None: no others.
        resume: True: go on from `checkpoint_dir` if there is a checkpoint, start otherwise. A path: go on
            from that file, which must exist. False: start, and refuse a folder that already holds a
            checkpoint.
        seed: seeds torch, Python and NumPy (offset by the process's rank). None: leaves them alone,
            but several processes are still told apart.
        progress: show a progress bar, where standard error is a terminal.
        diagnostics: inspect the trained posterior at the end and warn of what is wrong with it.
        accelerator: an `accelerate.Accelerator` of your own, which then decides device and precision.
    """

    epochs: int = 10
    objective: Objective = "elbo"
    n_data: int | None = None
    beta: float | Callable[[int], float] = 1.0
    samples: int = 1
    lr: float | None = None
    weight_decay: float = 0.0
    scheduler: SchedulerFactory | None = None
    scheduler_interval: Literal["step", "epoch"] = "epoch"
    clip_norm: float | None = None
    accumulation: int = 1
    precision: Precision = "no"
    patience: int | None = None
    min_delta: float = 0.0
    validation_samples: int = 8
    restore_best: bool = True
    standardize_targets: bool = False
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    resume: bool | str | os.PathLike[str] = False
    seed: int | None = None
    progress: bool = True
    diagnostics: bool = True
    accelerator: Any = None

    def __post_init__(self) -> None:
        for name in ("epochs", "samples", "accumulation"):
            _at_least(name, getattr(self, name), 1)
        for name in ("patience", "checkpoint_every", "n_data"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("validation_samples", self.validation_samples, 0)
        for name in ("weight_decay", "min_delta"):
            _number(name, getattr(self, name), zero=True)
        for name in ("lr", "clip_norm"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), zero=False)
        if not callable(self.beta):
            _number("beta", self.beta, zero=True)
        _one_of("objective", self.objective, ("elbo", "expected_loss"))
        _one_of("scheduler_interval", self.scheduler_interval, ("step", "epoch"))
        _one_of("precision", self.precision, ("no", "bf16", "fp16"))
        if self.scheduler is not None and not callable(self.scheduler):
            raise TypeError(
                f"scheduler must be a function from an optimizer to a scheduler, got {type(self.scheduler).__name__}; "
                "write scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=10)"
            )
        if self.resume is True and self.checkpoint_dir is None:
            raise ValueError("resume=True needs checkpoint_dir=, the folder to resume from")
        if self.checkpoint_every is not None and self.checkpoint_dir is None:
            raise ValueError("checkpoint_every= needs checkpoint_dir=, the folder to write to")


class FitOptions(TypedDict, total=False):
    """The fields of `FitConfig` as keyword arguments of `dubito.fit`."""

    epochs: int
    objective: Objective
    n_data: int | None
    beta: float | Callable[[int], float]
    samples: int
    lr: float | None
    weight_decay: float
    scheduler: SchedulerFactory | None
    scheduler_interval: Literal["step", "epoch"]
    clip_norm: float | None
    accumulation: int
    precision: Precision
    patience: int | None
    min_delta: float
    validation_samples: int
    restore_best: bool
    standardize_targets: bool
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_every: int | None
    resume: bool | str | os.PathLike[str]
    seed: int | None
    progress: bool
    diagnostics: bool
    accelerator: Any


def check_names(options: FitOptions) -> None:
    """Refuse an option that `FitConfig` does not have.

    Raises:
        TypeError: naming it and the nearest that exist.
    """
    from difflib import get_close_matches

    known = [field.name for field in fields(FitConfig)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3) or known
            raise TypeError(f"fit() has no argument {name!r}; did you mean {', '.join(near)}?")


def _at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _number(name: str, value: Any, *, zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'at least' if zero else 'above'} 0, got {value}")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
