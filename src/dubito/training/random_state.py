"""Every source of randomness a training run draws from, taken and put back as one tree of plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state(loader: Any = None) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's global generators, and of a loader's own ones.

    The result is a tree that `dubito.training.save_checkpoint` can hold.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "loader": [generator.get_state() for generator in loader_generators(loader)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], loader: Any = None) -> None:
    """Put back what `random_state` gave.

    Raises:
        ValueError: the loader has more or fewer generators than the one whose state was taken.
    """
    generators = loader_generators(loader)
    if len(generators) != len(state["loader"]):
        raise ValueError(
            f"the loader has {len(generators)} random generators, the saved state {len(state['loader'])}: resume with "
            "the same kind of loader"
        )
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    for generator, saved in zip(generators, state["loader"], strict=True):
        generator.set_state(saved)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def untouched_randomness(*loaders: Any) -> Iterator[None]:
    """Whatever is drawn inside, training goes on afterwards as if nothing had been."""
    states = [random_state(loader) for loader in (loaders or (None,))]
    try:
        yield
    finally:
        for state, loader in zip(states, loaders or (None,), strict=True):
            set_random_state(state, loader)


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers own, each once, in a fixed order."""
    found: list[torch.Generator] = []
    places, seen = [loader], 0
    while seen < len(places):
        place, seen = places[seen], seen + 1
        for name in ("generator", "synchronized_generator"):
            generator = getattr(place, name, None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
                found.append(generator)
        for name in ("sampler", "batch_sampler"):
            inner = getattr(place, name, None)
            if inner is not None and all(inner is not other for other in places):
                places.append(inner)
    return found
