"""Everything that can be found wrong before training is found here, with nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dubito.bayesian import BayesianModule
from dubito.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.training.batches import (
    Batch,
    check_loader,
    count_data,
    first_batch,
    split_batch,
    target_scale,
    to_device,
)
from dubito.training.checkpoints import check_writable
from dubito.training.config import FitConfig
from dubito.training.criterion import Criterion, Loss, NotFiniteInput, resolve_likelihood
from dubito.training.modes import flags_kept
from dubito.training.numerics import holds_not_finite
from dubito.training.optimizers import OptimizerFactory, make_optimizer
from dubito.training.random_state import untouched_randomness

LAST, BEST = "last.safetensors", "best.safetensors"


@dataclass
class Setup:
    """What a run needs, checked.

    Attributes:
        model: the module to train.
        criterion: its loss.
        train: the training loader.
        validation: the validation loader, or None.
        optimizer: the optimizer.
        config: everything else.
        accelerator: device, precision, processes.
        folder: where checkpoints go, or None.
        resume: the checkpoint to go on from, or None.
    """

    model: nn.Module
    criterion: Criterion
    train: Any
    validation: Any
    optimizer: Optimizer
    config: FitConfig
    accelerator: Any
    folder: Path | None
    resume: Path | None


def prepare(
    model: nn.Module,
    train: Any,
    validation: Any,
    likelihood: Likelihood | None,
    loss: Loss | None,
    optimizer: Optimizer | OptimizerFactory | None,
    config: FitConfig,
) -> Setup:
    """Check every argument, run one batch without leaving a trace, and make what is missing.

    Raises:
        TypeError, ValueError, CapabilityError, CheckpointError, FileNotFoundError, FileExistsError: see
            `dubito.fit`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_loader("train", train)
    if validation is not None:
        check_loader("validation", validation)
    elif config.patience is not None:
        raise ValueError("patience needs validation=, the data whose NLL decides when to stop")
    found = resolve_likelihood(model, likelihood, loss)
    if config.standardize_targets and not isinstance(found, Gaussian | HeteroscedasticGaussian):
        kind = "loss=" if found is None else type(found).__name__
        raise ValueError(f"standardize_targets is for Gaussian likelihoods (regression), not for {kind}")
    with_kl = config.objective == "elbo" and isinstance(model, BayesianModule)
    n_data = config.n_data if config.n_data is not None else _count(train, required=with_kl)
    folder, resume = _places(config)
    accelerator = _accelerator(config)
    criterion = Criterion(model, found, loss, config.samples, with_kl, n_data)
    _preflight(criterion, train, accelerator, config)
    if validation is not None:
        _preflight_validation(criterion, validation, accelerator)
    made = make_optimizer(model, external_parameters(model, found), config, optimizer)
    return Setup(model, criterion, train, validation, made, config, accelerator, folder, resume)


def external_parameters(model: nn.Module, likelihood: nn.Module | None) -> list[nn.Parameter]:
    """Trainable parameters of a likelihood that is not part of the model."""
    own = {id(p) for p in model.parameters()}
    found = [] if likelihood is None else list(likelihood.parameters())
    return [p for p in found if p.requires_grad and id(p) not in own]


def _count(train: Any, required: bool) -> int:
    try:
        return count_data(train)
    except ValueError:
        if required:
            raise
        return 1  # no KL to divide


def _places(config: FitConfig) -> tuple[Path | None, Path | None]:
    folder = None if config.checkpoint_dir is None else Path(config.checkpoint_dir)
    there = None if folder is None or not (folder / LAST).exists() else folder / LAST
    resume: Path | None
    if isinstance(config.resume, bool):
        resume = there if config.resume else None
    else:
        resume = Path(config.resume)
        resume = resume / LAST if resume.is_dir() else resume
        if not resume.is_file():
            raise FileNotFoundError(f"resume: no checkpoint at {str(resume)!r}")
    if there is not None and (resume is None or not there.samefile(resume)):
        raise FileExistsError(
            f"checkpoint_dir {str(folder)!r} already holds a run: pass resume=True to go on with it, or another "
            "folder, or delete it"
        )
    if folder is not None:
        check_writable(folder)
    return folder, resume


def _accelerator(config: FitConfig) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    accelerator = config.accelerator
    if accelerator is None:
        state = AcceleratorState._shared_state
        if state and state.get("_mixed_precision") != config.precision:
            # accelerate keeps one precision a process, but a second fit may want another
            AcceleratorState._reset_state()
        accelerator = Accelerator(mixed_precision=config.precision)
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError("accelerator: leave gradient_accumulation_steps at 1 and pass accumulation= instead")
    simple = [DistributedType.NO] + [
        getattr(DistributedType, n) for n in ("MULTI_CPU", "MULTI_GPU") if hasattr(DistributedType, n)
    ]
    if accelerator.distributed_type not in simple:
        raise ValueError(
            f"accelerator: {accelerator.distributed_type} shards or rewrites modules, which random weights do not "
            "survive; use one process, or several on CPU or GPU"
        )
    return accelerator


def _preflight(criterion: Criterion, train: Any, accelerator: Any, config: FitConfig) -> None:
    """One batch through everything, in evaluation behaviour and without gradient, as if it had not been."""
    model = criterion.model
    device = _device_of(model)
    with untouched_randomness(train), flags_kept(model, criterion.likelihood), torch.no_grad():
        batch = split_batch(first_batch("train", train))
        batch = to_device(batch, device) if device is not None else batch
        if config.standardize_targets and not batch.target.is_floating_point():
            raise TypeError(f"standardize_targets needs floating-point targets, got {batch.target.dtype}")
        _only_this_eval(model)
        try:
            with accelerator.autocast():
                terms = criterion(batch, 1.0)
        except NotFiniteInput as error:
            raise _no_value("train", batch, error) from error
    parts = {"nll": terms.nll, "kl": terms.kl}
    for name, value in parts.items():
        if not bool(torch.isfinite(value)):
            raise ValueError(
                f"the {name.upper()} of the first batch is {float(value)} before any training: look at the data, the "
                "initial weights and the prior"
            )


def _preflight_validation(criterion: Criterion, validation: Any, accelerator: Any) -> None:
    """One batch of the validation data, so that a wrong one is found before an epoch is trained, not after."""
    model = criterion.model
    device = _device_of(model)
    with untouched_randomness(validation), flags_kept(model, criterion.likelihood), torch.no_grad():
        batch = split_batch(first_batch("validation", validation))
        batch = to_device(batch, device) if device is not None else batch
        _only_this_eval(model)
        try:
            with accelerator.autocast():
                criterion(batch, 0.0)
        except NotFiniteInput as error:
            raise _no_value("validation", batch, error) from error
        except Exception as error:
            error.add_note("(in the first batch of validation=)")
            raise


def _no_value(name: str, batch: Batch, error: Exception) -> ValueError:
    remedy = (
        "drop or impute what is not finite in the data"
        if holds_not_finite(batch)
        else "the data are finite, so look at their scale and at the initial weights"
    )
    return ValueError(
        f"the NLL of the first batch of {name} has no value before any training ({error}): {remedy}"
    )


def _only_this_eval(model: nn.Module) -> None:
    """Evaluation behaviour of the user's layers, but random weights stay random: a mean may not exist."""
    if isinstance(model, BayesianModule):
        model.module.eval()
        model.training = True
    else:
        model.eval()


def _device_of(model: nn.Module) -> torch.device | None:
    tensor: Tensor | None = next(iter(model.parameters()), None)
    return None if tensor is None else tensor.device


def scale_targets(setup: Setup) -> None:
    """Compute the targets' mean and standard deviation and tell model and criterion."""
    device = setup.accelerator.device
    if setup.config.standardize_targets:
        with untouched_randomness(setup.train):
            use_scale(setup, *target_scale(setup.train, device))
    else:
        # a model whose predictive undoes a scale is trained on that scale
        use_scale(
            setup, getattr(setup.model, "target_shift", None), getattr(setup.model, "target_scale", None)
        )


def use_scale(setup: Setup, shift: Tensor | None, scale: Tensor | None) -> None:
    """Train on (y − shift) / scale from here on, and let the model's predictive undo it."""
    if shift is None or scale is None:
        return
    shift, scale = shift.to(setup.accelerator.device), scale.to(setup.accelerator.device)
    setup.criterion.shift, setup.criterion.scale = shift, scale
    if isinstance(setup.model, BayesianModule):
        setup.model.set_target_scale(shift, scale)
