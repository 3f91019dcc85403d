"""The energy a chain moves on: U(z) = -log p(y | x, w(z)) - log p(z), with its gradient, for one chain or many."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.likelihoods import Likelihood
from dubito.mcmc.config import SamplerConfig
from dubito.mcmc.coordinates import Coordinates, Priors, Values, blocks_of
from dubito.monte_carlo import as_arguments, run_draws
from dubito.priors import WeightPrior
from dubito.weights.empirical import Empirical
from dubito.weights.family import DubitoWarning, Family, key_of
from dubito.weights.point import Point
from dubito.weights.slots import Slot, find_slots

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_DROPOUT = nn.modules.dropout._DropoutNd


class Potential:
    """The negative log density of the posterior over the coordinates, for a copy of the user's network.

    The network runs with evaluation behaviour. Its parameters that need gradient are sampled; the others, and what a
    likelihood would learn, stay as they are.

    Args:
        module: the network; it is copied and left alone.
        prior: over its weights.
        x: all inputs: a tensor, or a tuple or mapping of the network's arguments.
        y: all targets.
        likelihood: None takes that of the prior, where it carries one.
        config: the sampler's.

    Attributes:
        coordinates: what the flat vector z means.
        start: the module's present weights.

    Raises:
        TypeError: a loader for x, or a network that is none.
        ValueError: NaN in the data, targets that do not fit the outputs, no trainable parameter, layers whose training
            behaviour makes the density random or dependent on the batch, priors that do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        prior: Priors,
        x: Any,
        y: Tensor,
        likelihood: Likelihood | None,
        config: SamplerConfig,
    ) -> None:
        _check_module(module)
        _check_inputs(x)
        likelihood = likelihood if likelihood is not None else _likelihood_of(prior)
        network = copy.deepcopy(module).to(config.dtype).eval()
        slots = _sampled(module, network)
        device = slots[0].parameter.device
        self.start: Values = {slot.name: slot.parameter.detach().clone() for slot in slots}
        blocks = blocks_of(network, slots, prior, config.whiten)
        self.coordinates = Coordinates(blocks, list(self.start), config.dtype, device)
        self.bayes = with_draws(
            network, {n: w.unsqueeze(0) for n, w in self.start.items()}, likelihood, config.output
        ).requires_grad_(False)
        self.likelihood = self.bayes.require_likelihood()
        if likelihood is not None and any(p.requires_grad for p in likelihood.parameters()):
            warnings.warn(
                f"the parameters that {type(likelihood).__name__} would learn have no prior, and are held as they are",
                DubitoWarning,
                stacklevel=3,
            )
        self.args, self.kwargs = as_arguments(_placed(x, config.dtype, device))
        self.y: Tensor = _placed(y, config.dtype, device)
        self.evaluations = 0  # of the gradient, summed over chains
        self._try()

    def _try(self) -> None:
        """One call with everything checked, so that what does not fit is said before sampling."""
        with torch.no_grad():
            outputs = self._outputs(self.start)
            self.likelihood.check_target(outputs, self.y)
            try:
                self.coordinates.weights(self.coordinates.of_weights(self.start))
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"the prior does not fit the weights that are sampled, {', '.join(self.start)} ({error}); a "
                    "learned prior is over those of process.network()"
                ) from error

    def _outputs(self, weights: Values) -> Tensor:
        """One call under one set of weights, or (C, batch, …) where C of them lead."""
        name, start = next(iter(self.start.items()))
        if weights[name].ndim == start.ndim:
            return self.bayes.select(self.bayes.run(weights, self.args, self.kwargs))
        components = {key_of(n): w for n, w in weights.items()}
        return run_draws(self.bayes, self.args, self.kwargs, [components], len(weights[name]))

    def energy(self, z: Tensor) -> Tensor:
        """U in nats: () of coordinates (D,), or (C,) of (C, D); differentiable."""
        weights, log_prior = self.coordinates.weights_and_log_prior(z)
        return -self.likelihood.log_prob(self._outputs(weights), self.y).sum(-1) - log_prior

    def energy_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """U, (C,), and its gradient, (C, D), at (C, D). Chains do not know of each other."""
        self.evaluations += len(z)
        with torch.enable_grad():
            place = z.detach().requires_grad_(True)
            energy = self.energy(place)
            (gradient,) = torch.autograd.grad(energy.sum(), place)
        return energy.detach(), gradient

    def starts(self, config: SamplerConfig) -> Tensor:
        """Where the chains begin, (chains, D), by the global generator.

        Raises:
            ValueError: given weights that do not fit, or a start of zero density.
        """
        if isinstance(config.init, Mapping):
            z = self.coordinates.of_weights(self._given(config.init, config.chains))
        elif config.init == "module":
            z = self.coordinates.of_weights(self.start).expand(config.chains, -1).clone()
        else:
            z = self.coordinates.draw(config.chains)
        with torch.no_grad():
            energy = self.energy(z)
        if not bool(energy.isfinite().all()):
            bad = [i for i, finite in enumerate(energy.isfinite().tolist()) if not finite]
            raise ValueError(
                f"the log density is not finite where chains {bad} start (init={config.init!r}): start from trained "
                'weights (init="module"), and look at the scales of the data and the prior'
            )
        return z

    def _given(self, init: Mapping[str, Tensor], chains: int) -> Values:
        result: Values = {}
        for name, like in self.start.items():
            if name not in init:
                raise ValueError(f"init has no weights for {name!r}; it needs {', '.join(self.start)}")
            value = torch.as_tensor(init[name]).detach().to(like)
            if value.shape == like.shape:
                value = value.expand(chains, *like.shape)
            if value.shape != (chains, *like.shape):
                raise ValueError(
                    f"init[{name!r}] has shape {tuple(value.shape)}; {tuple(like.shape)} is needed for all chains, or "
                    f"({chains}, {', '.join(map(str, like.shape))}) for each its own"
                )
            result[name] = value
        return result


def with_draws(
    network: nn.Module, draws: Mapping[str, Tensor], likelihood: Likelihood | None, output: Any
) -> BayesianModule:
    """A Bayesian module of the given network (which it takes over) with these draws for some of its parameters."""
    families: dict[Any, Family] = {
        slot.name: Point() for slot in find_slots(network) if slot.name not in draws
    }
    families["rest"] = Empirical(draws)
    made = bayesianize(network, families, likelihood=copy.deepcopy(likelihood), output=output)
    return made.eval()


@contextmanager
def randomness_of(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """The global generator seeded from a given one (or from itself) inside, and left as it was.

    Where no generator is given, the global one goes on by the one number that the seed takes.
    """
    place = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=place))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _likelihood_of(prior: Priors) -> Likelihood | None:
    carried = getattr(prior, "likelihood", None) if isinstance(prior, WeightPrior) else None
    return carried if isinstance(carried, Likelihood) else None


def _sampled(module: nn.Module, network: nn.Module) -> list[Slot]:
    """The slots of the copy whose parameters need gradient in the original."""
    wanted = {slot.name for slot in find_slots(module) if slot.requires_grad}
    slots = [slot for slot in find_slots(network) if slot.name in wanted]
    if not slots:
        raise ValueError(
            "the module has no parameter to sample: parameters with requires_grad=False are held as they are"
        )
    return slots


def _check_module(module: object) -> None:
    if isinstance(module, BayesianModule):
        raise TypeError("module is a BayesianModule; sample bayes.merge(), the plain network")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, not {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORM) and (part.training or not part.track_running_stats):
            remedy = (
                "call module.eval() first, to sample with its running statistics"
                if part.track_running_stats
                else "it keeps no running statistics; use another normalisation"
            )
            raise ValueError(
                f"{name or 'module'!r} normalises by the batch, so the likelihood of one datum would depend on the "
                f"others and there is no posterior to sample: {remedy}"
            )
        if isinstance(part, _DROPOUT) and part.training and part.p > 0:
            raise ValueError(
                f"{name or 'module'!r} is active dropout, which makes the log density random; call module.eval() "
                "first, to sample the network without dropout"
            )


def _check_inputs(x: Any) -> None:
    if isinstance(x, Iterable) and not isinstance(x, Tensor | tuple | Mapping):
        raise TypeError(
            f"x must be all inputs at once (a tensor, or a tuple or mapping of them), not {type(x).__name__}. "
            "Minibatches are not offered: a test for acceptance by the energy of some of the data leaves another "
            "distribution than the posterior stationary. Concatenate the batches, or fit a variational family to data "
            "that do not fit in memory"
        )
    for leaf in torch.utils._pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            bad = int((~leaf.isfinite()).sum())
            raise ValueError(
                f"x holds {bad} NaN or infinite of {leaf.numel()} values, so no weights have a density: drop or "
                "impute them"
            )


def _placed(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    def place(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().to(device=device, dtype=dtype if t.is_floating_point() else None)

    return torch.utils._pytree.tree_map(place, value)
