"""`fit`: the loop everybody writes, written once."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from dubito.bayesian import BayesianModule
from dubito.diagnostics import WeightSpread, findings, prediction_spread, spread, summary
from dubito.implicit_bias import warn_of_lost_implicit_bias
from dubito.likelihoods import Likelihood
from dubito.training.batches import first_batch, split_batch, to_device
from dubito.training.config import FitConfig, FitOptions, check_names
from dubito.training.criterion import Loss
from dubito.training.modes import flags_kept
from dubito.training.optimizers import OptimizerFactory
from dubito.training.random_state import untouched_randomness
from dubito.training.result import FitResult
from dubito.training.run import TrainingRun
from dubito.training.setup import Setup, prepare, scale_targets
from dubito.weights.family import CapabilityError, DubitoWarning


def fit(
    model: nn.Module,
    train: Any,
    validation: Any = None,
    *,
    likelihood: Likelihood | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    config: FitConfig | None = None,
    **options: Unpack[FitOptions],
) -> FitResult:
    """Train a module with random weights, or a plain one, in place.

    `dubito.fit(bayes, train_loader, epochs=10)` is enough for a module that has a likelihood. The loss of a
    step is per example and in nats: mean NLL + beta · KL / N for `objective="elbo"`, the mean NLL over draws
    for `objective="expected_loss"`.

    A run with `checkpoint_dir` can be stopped at any moment and taken up with `resume=True`: parameters end
    bit-identical to those of a run that was not stopped, on the same machine and build of torch. Saved are
    weights, optimizer, scheduler, gradient scaler, the states of all random generators (torch on every
    device, Python, NumPy, the loader's own) and the position in the epoch. Not saved is what lives in workers
    that outlast an epoch (`persistent_workers=True` with random augmentation), nor in an iterable data set.

    Ctrl-C leaves the last checkpoint in place and is raised on.

    Args:
        model: a `BayesianModule`, or any module given a likelihood or a loss. It ends with the weights of the
            best validation NLL where there is validation data, else the last ones; its `training` flags are
            put back.
        train: a DataLoader, or a sequence of batches: `(inputs, target)`, or a mapping with `labels`.
        validation: the same; its NLL is that of the predictive averaged over `validation_samples` draws.
        likelihood: where the model has none. A `BayesianModule` keeps it.
        loss: instead of a likelihood, a function of outputs and target to a scalar mean over the batch.
        optimizer: an optimizer, or a function from parameter groups to one. None: Adam, or SGD with momentum
            0.9 for the expected loss, whose implicit bias Adam loses. Under a `dubito.IVON`, for plain modules,
            every step runs inside its `sampled_params()`, `mc_samples` times; validation is at the means.
        config: a `FitConfig`.
        options: any field of `FitConfig`, which see; they win over `config`.

    Returns:
        A `FitResult`: the history, the best epoch, a summary of the posterior and what is wrong with it.

    Raises:
        TypeError: an unknown option or an argument of the wrong kind.
        ValueError: an empty loader, an unknown N, no likelihood, a loss that is not a scalar, a label out of
            range. As all of these, it is raised before anything is changed.
        CapabilityError: the ELBO of a posterior that has no KL.
        CheckpointError, FileNotFoundError, FileExistsError: a folder that cannot be written, a checkpoint
            that does not exist, is damaged, of another model, or would be overwritten.
        NonFiniteError: the first NaN or infinity in loss or gradient; the model is back at its last good
            state and the last checkpoint is kept.
    """
    check_names(options)
    settings = replace(config if config is not None else FitConfig(), **options)
    setup = prepare(model, train, validation, likelihood, loss, optimizer, settings)
    return _train(setup, likelihood)


def _train(setup: Setup, likelihood: Likelihood | None) -> FitResult:
    model, settings = setup.model, setup.config
    if settings.objective == "expected_loss":
        warn_of_lost_implicit_bias(model, "objective='expected_loss'", setup.optimizer, stacklevel=4)
    if settings.seed is not None or setup.accelerator.num_processes > 1:
        _seed(settings.seed if settings.seed is not None else torch.initial_seed(), setup)
    if isinstance(model, BayesianModule) and model.likelihood is None and likelihood is not None:
        model.likelihood = likelihood  # so that predict knows it
    before = spread(model) if settings.diagnostics and isinstance(model, BayesianModule) else {}
    run = TrainingRun(setup)
    if setup.resume is None:
        scale_targets(setup)
    run.begin()
    try:
        run.train_all()
    except KeyboardInterrupt as interrupt:
        if run.written is not None:
            interrupt.add_note(f"the checkpoint {str(run.written)!r} is kept; resume=True goes on from there")
        raise
    return _result(setup, run, before)


def _seed(seed: int, setup: Setup) -> None:
    import random

    import numpy as np

    # every process draws its own noise, seeded by the user or not: equal noise would not be averaged out
    seed = (seed + int(setup.accelerator.process_index)) % 2**63
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _result(setup: Setup, run: TrainingRun, before: dict[str, WeightSpread]) -> FitResult:
    position = run.position
    result = FitResult(
        model=setup.model,
        history=position.history,
        n_data=setup.criterion.n_data,
        steps=position.step,
        best_epoch=position.best_epoch,
        best_validation_nll=position.best_nll,
        stopped_early=position.stopped_early,
        resumed_from=run.resumed_from,
        checkpoint=run.written,
        target_shift=setup.criterion.shift,
        target_scale=setup.criterion.scale,
    )
    if setup.config.diagnostics and isinstance(setup.model, BayesianModule):
        _inspect(setup, result, before)
    return result


def _inspect(setup: Setup, result: FitResult, before: dict[str, WeightSpread]) -> None:
    bayes: Any = setup.model
    with untouched_randomness(setup.train), flags_kept(bayes):
        batch = to_device(split_batch(first_batch("train", setup.train)), setup.accelerator.device)
        after = spread(bayes)
        if not after:
            return
        try:
            predictions = prediction_spread(bayes, batch.inputs)
        except CapabilityError:
            predictions = None
        result.summary = summary(bayes)
    result.warnings = findings(after, before, predictions)
    for text in result.warnings:
        warnings.warn(text, DubitoWarning, stacklevel=5)
