"""The training loop: steps, epochs, validation, and a position that can be saved and taken up again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito.training.batches import Batch, split_batch, to_device
from dubito.training.checkpoints import CheckpointError, save_checkpoint
from dubito.training.criterion import NotFiniteInput
from dubito.training.distributed import average_gradients, broadcast_module, gather, mean_over_processes
from dubito.training.modes import flags_kept
from dubito.training.numerics import NonFiniteError, diagnose, gradient_norm, not_finite
from dubito.training.optimizers import weight_draws
from dubito.training.position import Position
from dubito.training.progress import ProgressBar
from dubito.training.random_state import random_state, set_random_state
from dubito.training.resume import everything_else, restore
from dubito.training.setup import BEST, LAST, Setup
from dubito.training.snapshots import Weights, copy_weights, load_weights
from dubito.training.validation import validation_nll


class TrainingRun:
    """One run, from `Setup` to a trained model; `dubito.fit` is its front."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config, self.model = setup, setup.config, setup.model
        self.criterion, self.accelerator = setup.criterion, setup.accelerator
        likelihood = setup.criterion.likelihood
        outside = likelihood is not None and all(likelihood is not m for m in self.model.modules())
        self.outside: nn.Module | None = likelihood if outside else None
        self.position = Position()
        self.resumed_from: int | None = None
        self.written: Path | None = None
        self.skipped = 0

    # ---- beginning ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Move everything to its device and, where asked, to where an earlier run was."""
        device = self.accelerator.device
        for module in (self.model, self.outside):
            if module is not None:
                module.to(device)
        if self.accelerator.num_processes > 1:
            self.train = self.accelerator.prepare_data_loader(self.setup.train, device_placement=False)
            for module in (self.model, self.outside):
                broadcast_module(module)
        else:
            self.train = self.setup.train
        # accelerate's wrapper is for gradient scaling; without it, it only searches for packages at every step
        scaled = self.accelerator.scaler is not None
        self.optimizer = (
            self.accelerator.prepare_optimizer(self.setup.optimizer) if scaled else self.setup.optimizer
        )
        make = self.config.scheduler
        self.scheduler = None if make is None else make(self.setup.optimizer)
        self.parameters = [p for group in self.setup.optimizer.param_groups for p in group["params"]]
        if self.setup.resume is not None:
            restore(self, self.setup.resume)
            self.resumed_from, self.written = self.position.step, self.setup.resume
        self.good = self._weights()
        self.good_step = self.position.step
        self.candidate: Weights | None = None

    # ---- epochs ------------------------------------------------------------------------------------------

    def train_all(self) -> None:
        """All epochs that are left, with flags as they were afterwards."""
        position = self.position
        try:
            batches = len(self.train)
        except TypeError:
            batches = None
        shown = self.config.progress and self.accelerator.is_main_process
        with flags_kept(self.model, self.outside), ProgressBar(self.config.epochs, batches, shown) as bar:
            while position.epoch < self.config.epochs and not position.stopped_early:
                self._epoch(bar, batches or 0)
        # A loop of one's own may follow, and would add to the last step's gradients.
        self.setup.optimizer.zero_grad(set_to_none=True)
        if self.config.restore_best and position.best_epoch is not None:
            self.load_weights(self.best)

    def _epoch(self, bar: ProgressBar, batches: int) -> None:
        position, started = self.position, time.monotonic()
        self.model.train()
        if self.outside is not None:
            self.outside.train()
        for group in self._groups():
            parts = self._step(group)
            bar.step(
                position.epoch, position.epoch * batches + position.batch, parts, position.last_validation
            )
            every = self.config.checkpoint_every
            if every is not None and position.step % every == 0:
                self._keep()
        if position.sums is None:
            raise ValueError("train gave no batches this epoch: a loader must be usable again and again")
        self._end_epoch(started)

    def _groups(self) -> Iterator[list[Batch]]:
        """Batches by the step, from wherever in the epoch we are.

        A resumed epoch begins with the random state it began with, fetches and discards the batches already
        used, and then goes on with the random state of the moment of the checkpoint. Fetching, rather than
        skipping in the sampler, keeps random augmentation exact as well.
        """
        position = self.position
        if position.batch == 0:
            position.epoch_random = self._random()
        for place in (self.train, getattr(self.train, "sampler", None)):
            set_epoch = getattr(place, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(position.epoch)
        if position.batch:
            self.set_random(position.epoch_random)
        iterator = iter(self.train)
        if position.batch:
            for _ in range(position.batch):
                next(iterator)
            self.set_random(position.random)
        group: list[Batch] = []
        for raw in iterator:
            group.append(split_batch(raw))
            if len(group) == self.config.accumulation:
                yield group
                group = []
        if group:
            yield group

    def _end_epoch(self, started: float) -> None:
        position = self.position
        validation = self._validate() if self.setup.validation is not None else None
        record = position.record(
            offset=self.criterion.offset,
            beta=self._beta(max(position.step - 1, 0)),
            lr=float(self.setup.optimizer.param_groups[0]["lr"]),
            seconds=time.monotonic() - started,
            validation=validation,
        )
        position.history.append(record)
        position.last_validation = validation
        self._schedule("epoch", validation if validation is not None else record.loss)
        position.epoch, position.batch = position.epoch + 1, 0
        position.sums = position.epoch_random = None
        if validation is not None:
            self._judge(validation)
        self._keep()

    def _judge(self, validation: float) -> None:
        position = self.position
        best = position.best_nll
        if best is None or validation < best - self.config.min_delta:
            position.best_nll, position.best_epoch, position.waited = validation, position.epoch, 0
            self.best = self._weights()
            if self.setup.folder is not None and self.accelerator.is_main_process:
                self.write_best()
        else:
            position.waited += 1
        position.stopped_early = self.out_of_patience()

    def out_of_patience(self) -> bool:
        """Whether validation has not improved for as long as was agreed."""
        return self.config.patience is not None and self.position.waited >= self.config.patience

    def write_best(self) -> None:
        """Write the best weights so far."""
        assert self.setup.folder is not None
        found = {"epoch": self.position.best_epoch, "nll": self.position.best_nll}
        save_checkpoint(self.setup.folder / BEST, {"weights": self.best, **found})

    # ---- steps -------------------------------------------------------------------------------------------

    def _step(self, group: list[Batch]) -> Tensor:
        """One optimizer step on one or several batches weighted by size; their loss, NLL and KL."""
        position, beta = self.position, self._beta(self.position.step)
        self.optimizer.zero_grad()
        total = sum(batch.size for batch in group)
        group[:] = [to_device(batch, self.accelerator.device) for batch in group]
        try:
            parts, kls = self._gradients(group, total, beta)
        except NotFiniteInput as error:
            raise self._failure("nll", f"the NLL has no value ({error})", []) from error
        parts = mean_over_processes(parts, self.accelerator)
        average_gradients(self.parameters, self.setup.optimizer, self.accelerator)
        self._check(parts, group)
        self.optimizer.step()
        self._count_skipped()
        self._schedule("step", None)
        position.step += 1
        position.batch += len(group)
        weights = parts.new_tensor([total, total, kls, total, kls])
        row = torch.cat([parts, parts.new_ones(2)]) * weights
        wide = row.double() if row.device.type != "mps" else row
        position.sums = wide if position.sums is None else position.sums + wide
        if self.candidate is not None:  # the snapshot has now been seen to give a finite loss and gradient
            self.good, self.good_step, self.candidate = self.candidate, position.step - 1, None
        return parts

    def _gradients(self, group: list[Batch], total: int, beta: float) -> tuple[Tensor, int]:
        """Forward and backward: the step's gradients, its loss, NLL and KL, and of how many evaluations."""
        blocks = weight_draws(self.setup.optimizer)
        parts, kls = torch.zeros(3, device=self.accelerator.device), 0
        for block in blocks:
            with block:
                for batch in group:
                    with self.accelerator.autocast():
                        terms = self.criterion(batch, beta)
                    self.accelerator.backward(terms.loss * (batch.size / total))
                    values = torch.stack([terms.loss.detach(), terms.nll.detach(), terms.kl.detach()])
                    parts = parts + values.to(parts.dtype) * (batch.size / total / len(blocks))
                    kls += 1
        return parts, kls

    def _check(self, parts: Tensor, group: list[Batch]) -> None:
        scaled = self.accelerator.scaler is not None
        if self.config.clip_norm is not None:
            self.accelerator.unscale_gradients()
        norm = gradient_norm(self.parameters)
        # one look at the device a step; under a gradient scaler an infinite gradient is its own business
        if not bool(torch.isfinite(parts).all() & (scaled | torch.isfinite(norm))):
            values = dict(zip(("loss", "nll", "kl"), parts.tolist(), strict=True))
            part, said, concerned = diagnose(values, self.model, self.outside, group)
            if part:
                raise self._failure(part, said, concerned)
        if self.config.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_norm, norm)

    def _count_skipped(self) -> None:
        skipped = self.accelerator.scaler is not None and getattr(self.optimizer, "step_was_skipped", False)
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped >= 50:
            raise self._failure("gradient", "50 steps in a row overflowed fp16 (use precision='bf16')", [])

    def _failure(self, part: str, said: str, concerned: list[str], taken: bool = False) -> NonFiniteError:
        step, epoch = self.position.step + (not taken), self.position.epoch + 1
        self.setup.optimizer.zero_grad(set_to_none=True)
        self.load_weights(self.good)
        kept = f"; the checkpoint {str(self.written)!r} is kept" if self.written is not None else ""
        return NonFiniteError(
            f"step {step} (epoch {epoch}): {said}. {'' if taken else 'The step was not taken. '}The model is "
            f"back where it was after step {self.good_step}{kept}. Try a lower lr, clip_norm=1.0, or a smaller initial "
            "spread",
            step=step,
            epoch=epoch,
            part=part,
            parameters=concerned,
        )

    def _beta(self, step: int) -> float:
        beta = self.config.beta
        return float(beta(step)) if callable(beta) else float(beta)

    def _schedule(self, moment: str, metric: float | None) -> None:
        if self.scheduler is None or self.config.scheduler_interval != moment:
            return
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if metric is not None:
                self.scheduler.step(metric)
        else:
            self.scheduler.step()

    def _validate(self) -> float:
        loader, samples = self.setup.validation, self.config.validation_samples
        try:
            value = validation_nll(self.criterion, self.outside, loader, self.accelerator, samples)
            said = "" if math.isfinite(value) else str(value)
        except NotFiniteInput as error:
            value, said = math.nan, str(error)
        if said:
            broken = not_finite(dict(self.model.named_parameters()))
            raise self._failure(
                "nll", f"after it, the validation NLL has no value ({said})", broken, taken=True
            )
        return value

    # ---- saving and restoring ----------------------------------------------------------------------------

    def _weights(self) -> Weights:
        return copy_weights(self.model, self.outside)

    def load_weights(self, weights: Weights) -> None:
        """Put trained weights back."""
        load_weights(weights, self.model, self.outside)

    def _random(self) -> list[dict[str, Any]]:
        return gather(random_state(self.train), self.accelerator)

    def set_random(self, states: list[dict[str, Any]] | None) -> None:
        """Put this process's random state back.

        Raises:
            CheckpointError: the states are of another number of processes.
        """
        assert states is not None
        rank = self.accelerator.process_index
        if len(states) != self.accelerator.num_processes:
            raise CheckpointError(
                f"the checkpoint is of {len(states)} processes, this run has {self.accelerator.num_processes}"
            )
        set_random_state(states[rank], self.train)

    def _keep(self) -> None:
        """Take a snapshot, and write a checkpoint where there is a folder for it."""
        broken = not_finite(dict(self.model.named_parameters()))
        if broken:
            raise self._failure(
                "parameters", f"after it, not finite: {', '.join(broken)}", broken, taken=True
            )
        self.candidate = self._weights()
        if self.setup.folder is None:
            return
        self.position.random = self._random()
        if self.accelerator.is_main_process:
            save_checkpoint(self.setup.folder / LAST, {"weights": self.candidate, **everything_else(self)})
        self.written = self.setup.folder / LAST
        self.accelerator.wait_for_everyone()  # whoever looks next must find it
