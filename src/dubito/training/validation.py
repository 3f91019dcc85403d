"""The validation NLL."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dubito.bayesian import BayesianModule
from dubito.training.batches import split_batch, to_device
from dubito.training.criterion import Criterion
from dubito.training.modes import flags_kept
from dubito.training.random_state import untouched_randomness

SEED = 20150705


@torch.no_grad()
def validation_nll(
    criterion: Criterion, likelihood: nn.Module | None, loader: Any, accelerator: Any, samples: int
) -> float:
    """Mean over the examples of −log predictive density, in nats, of the targets as given.

    The predictive is averaged over `samples` draws of the weights, the same standard noise at every call, so
    that epochs are compared and not draws; `samples=0` is one pass at the posterior mean. Layers are in
    evaluation behaviour; flags and random states are put back.

    Raises:
        ValueError: the loader gives no batches.
    """
    model, device = criterion.model, accelerator.device
    count = 0
    with untouched_randomness(loader), flags_kept(model, likelihood):
        model.eval()
        if likelihood is not None:
            likelihood.eval()
        draws = None
        if samples and isinstance(model, BayesianModule):
            draws = model.draw(samples, generator=torch.Generator(device=device).manual_seed(SEED))
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.zeros((), dtype=dtype, device=device)
        for raw in loader:
            batch = to_device(split_batch(raw), device)
            with accelerator.autocast():
                total += criterion.predictive_nll(batch, draws)
            count += batch.size
    if count == 0:
        raise ValueError("validation is empty: it gives no batches")
    return float(total) / count
