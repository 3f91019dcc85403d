"""What a sampler is told besides the network, the prior and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from dubito.monte_carlo import check_generator
from dubito.scalar_checks import count, non_negative, positive

Init = Literal["prior", "module"] | Mapping[str, Tensor]


class SamplerOptions(TypedDict, total=False):
    """The fields of `SamplerConfig` as keyword arguments."""

    samples: int
    warmup: int
    chains: int
    init: Init
    whiten: bool | None
    target_accept: float
    step_size: float | None
    dtype: torch.dtype
    output: Callable[[Any], Tensor] | None
    generator: torch.Generator | None
    progress: bool


class NUTSOptions(SamplerOptions, total=False):
    """The fields of `NUTSConfig` as keyword arguments of `nuts`."""

    max_tree_depth: int
    full_mass: bool


class HMCOptions(SamplerOptions, total=False):
    """The fields of `HMCConfig` as keyword arguments of `hmc`."""

    leapfrog_steps: int
    adapt: bool
    jitter: float


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What both samplers are told.

    Attributes:
        samples: draws kept of each chain, S.
        warmup: iterations before them, in which the step is adapted; they are thrown away.
        chains: independent chains. With one, R-hat only compares its halves.
        init: where chains start: at a "prior" draw each (scattered, as R-hat wants it), all at the "module"'s present
            weights, or at given weights by name, of shape `(chains, *shape)` or `(*shape)`.
        whiten: sample coordinates in which the prior is standard normal, which makes learned and correlated priors
            round. None: wherever the prior can; True: everywhere, or it is an error; False: nowhere.
        target_accept: mean acceptance probability that the step size is adapted to.
        step_size: of the leapfrog, where the adaptation starts; None finds one.
        dtype: of all computing. Energies are sums over the data and their small differences decide, so float64.
        output: picks the tensor out of what the network returns, as in `bayesianize`.
        generator: source of all randomness; None draws a seed from the global generator, which is left alone else.
        progress: show a progress bar.
    """

    samples: int = 500
    warmup: int = 500
    chains: int = 4
    init: Init = "prior"
    whiten: bool | None = None
    target_accept: float = 0.8
    step_size: float | None = None
    dtype: torch.dtype = torch.float64
    output: Callable[[Any], Tensor] | None = None
    generator: torch.Generator | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        count("samples", self.samples, "draws kept of each chain; R-hat compares halves of chains", 4)
        count("warmup", self.warmup, "iterations of adaptation", 0)
        count("chains", self.chains, "independent chains")
        check_generator(self.generator)
        if not 0 < self.target_accept < 1:
            raise ValueError(
                f"target_accept={self.target_accept!r} must lie between 0 and 1: 0.8 usually, 0.95 if chains diverge"
            )
        if self.step_size is not None:
            positive("step_size", self.step_size)
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={self.dtype} must be torch.float64 or torch.float32")
        if not isinstance(self.init, Mapping) and self.init not in ("prior", "module"):
            raise ValueError(
                f'init={self.init!r} must be "prior", "module", or a mapping of names to weights'
            )


@dataclass(frozen=True, kw_only=True)
class NUTSConfig(SamplerConfig):
    """What `nuts` is told besides.

    Attributes:
        max_tree_depth: an iteration takes at most 2 to this power leapfrog steps.
        full_mass: adapt a dense mass matrix, not a diagonal one: for correlated posteriors of few weights.
    """

    max_tree_depth: int = 10
    full_mass: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        count("max_tree_depth", self.max_tree_depth, "doublings of a trajectory")


@dataclass(frozen=True, kw_only=True)
class HMCConfig(SamplerConfig):
    """What `hmc` is told besides.

    Attributes:
        leapfrog_steps: L, of each proposal.
        adapt: adapt the step size in warm-up by dual averaging. Without it `step_size` has to be given.
        jitter: each proposal's step size is multiplied by a uniform draw from 1 ± jitter, so that no trajectory is of
            the period of a mode of the posterior (Neal 2011, section 5.4.2.2).
    """

    leapfrog_steps: int = 20
    adapt: bool = True
    jitter: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        count("leapfrog_steps", self.leapfrog_steps, "of each proposal")
        if non_negative("jitter", self.jitter) >= 1:
            raise ValueError(f"jitter={self.jitter!r} must be below 1: step sizes stay positive")
        if self.step_size is None and (not self.adapt or self.warmup == 0):
            raise ValueError("step_size must be given where it is not adapted (adapt=False or warmup=0)")


def check_names(function: str, config: type[SamplerConfig], options: Mapping[str, Any]) -> None:
    """Refuse an option that the configuration does not have.

    Raises:
        TypeError: naming it and the nearest that exist.
    """
    from difflib import get_close_matches

    known = [field.name for field in fields(config)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3) or known
            more = ""
            if name in ("batch_size", "minibatch", "chunk_size"):
                more = (
                    ". Minibatches are not offered: the energy of some of the data is not the posterior's, and a test "
                    "for acceptance by it leaves another distribution stationary"
                )
            raise TypeError(f"{function}() has no argument {name!r}; there are {', '.join(near)}{more}")
