"""A module and its random weights.

The network is never changed or subclassed: for the length of a call its parameters are replaced by a draw, and put
back whatever happens. `dubito.conversion.bayesianize` makes a `BayesianModule` from any `nn.Module`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dubito.divergences import KLMethod
from dubito.likelihoods import Likelihood
from dubito.monte_carlo import (
    Draws,
    as_arguments,
    check_draws,
    check_generator,
    check_samples,
    device_of,
    estimated_keys,
    fresh_components,
    outputs_drawn_from,
    predict,
    run_draws,
)
from dubito.plain_copy import plain_copy
from dubito.predictive import Predictive
from dubito.priors import WeightPrior
from dubito.snapshot import Snapshot, squared_wasserstein
from dubito.swap import Swap, watch_checkpointing
from dubito.weights.drawn import DrawnWeight, say_fallback, saying_once
from dubito.weights.family import CapabilityError, Family, WeightPosterior, key_of
from dubito.weights.slots import recurrent_owners

Selector = Callable[[Any], Tensor]
Values = dict[str, Tensor]

_PASSED_ON = frozenset(
    (
        "config",
        "generation_config",
        "gradient_checkpointing_enable",
        "gradient_checkpointing_disable",
        "is_gradient_checkpointing",
        "supports_gradient_checkpointing",
        "activation_checkpointing_enable",
        "activation_checkpointing_disable",
        "is_activation_checkpointing",
        "main_input_name",
        "get_input_embeddings",
        "get_output_embeddings",
        "can_generate",
    )
)  # what trainers ask of a Hugging Face model


class _Forward:
    """The forward pass, with the signature of the network's own."""

    def __init__(self, bayes: BayesianModule) -> None:
        self._bayes = bayes

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._bayes.module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bayes._call(args, kwargs)


class BayesianModule(nn.Module):
    """A network whose weights are random. Made by `bayesianize`.

    In `train()` a call is one fresh draw (shared by the batch, unless the family's estimator says otherwise); in
    `eval()` it runs at the posterior mean, as dropout does.

    Attributes:
        module: the network itself. Gaussian means are its own parameters.
        posterior: the `WeightPosterior`s, by (first) parameter name with dots as slashes.
        likelihood: how outputs become a distribution over targets, or None.
        families: the family of every parameter, by name (parameters without one are not listed).
    """

    def __init__(
        self,
        module: nn.Module,
        posteriors: Sequence[WeightPosterior],
        families: dict[str, Family],
        likelihood: Likelihood | None,
        output: Selector | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.posterior = nn.ModuleDict({key_of(p.slots[0].name): p for p in posteriors})
        self.likelihood = likelihood
        self.families = families
        joint = {id(prior): prior for p in posteriors for prior in p.joint_prior}
        self.joint_priors = nn.ModuleList(joint.values())
        self.target_shift: Tensor | None
        self.target_scale: Tensor | None
        self.register_buffer("target_shift", None)
        self.register_buffer("target_scale", None)
        self._output = output
        self._slots = {slot.name: slot for p in posteriors for slot in p.slots}
        self._recurrent = recurrent_owners(list(self._slots.values()))
        self._needs_loop = False  # set once `vmap` has met an operator without a batching rule
        self._said: set[tuple[str, str]] = set()  # which operators had no rule for an estimator
        self._lock = threading.RLock()
        self.register_load_state_dict_post_hook(_tie_again)
        watch_checkpointing()

    # ---- calling ----------------------------------------------------------------------------------------

    @property
    def forward(self) -> _Forward:  # type: ignore[override]
        """One draw in `train()`, the posterior mean in `eval()`; the network's own signature and output.

        Raises:
            CapabilityError: in `eval()`, where a family has no closed-form mean; use `sample` or `predict`.
        """
        return _Forward(self)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            values = self._training_values() if self.training else self._mean_values()
            return self.run(values, args, kwargs)

    def run(self, values: Values, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the network with `values` (by parameter name) in place of its parameters."""
        if not values:
            with self._lock:
                return self.module(*args, **kwargs)
        with saying_once(self._said), self._swap(values):
            return self.module(*args, **kwargs)

    def _swap(self, values: Values) -> Swap:
        pairs = []
        for name, value in values.items():
            slot = self._slots[name]
            if isinstance(value, DrawnWeight) and any(isinstance(o, nn.RNNBase) for o, _ in slot.places):
                if value.estimator is not None:
                    say_fallback(value.estimator, type(slot.owner).__name__)
                value = value.dense()  # the fused kernels take plain weights, drawn once for all time steps
            pairs.append((slot, value))
        return Swap(pairs, self._recurrent, self._lock)

    def posteriors(self) -> Iterable[WeightPosterior]:
        """The posteriors of all groups of parameters."""
        values: Any = self.posterior.values()
        return values  # type: ignore[no-any-return]

    def _training_values(self) -> Values:
        values: Values = {}
        for posterior in self.posteriors():
            values.update(posterior.training_weights())
        return values

    def _mean_values(self) -> Values:
        values: Values = {}
        for posterior in self.posteriors():
            try:
                values.update(posterior.mean_weights() or {})
            except CapabilityError as error:
                raise CapabilityError(
                    f"eval() runs at the posterior mean, and {posterior.slots[0].name!r} has no closed-form one "
                    f"({error}); use bayes.sample() for one draw as a function, or bayes.predict(x) for the "
                    "average over draws"
                ) from error
        return values

    def select(self, output: Any) -> Tensor:
        """The tensor among what the network returns: itself, `.logits`, or by the `output` selector.

        Raises:
            TypeError: if there is none.
        """
        if self._output is not None:
            output = self._output(output)
        elif not isinstance(output, Tensor):
            output = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the network returned {type(output).__name__}, not a tensor (or something with .logits); say "
                "which part is the output: bayesianize(…, output=lambda o: o[0])"
            )
        return output

    # ---- draws --------------------------------------------------------------------------------------------

    def draw(self, samples: int, generator: torch.Generator | None = None) -> Draws:
        """`samples` draws of the weights, to be used on as many inputs as wished.

        They are kept as noise, so they are the same functions of the posterior's parameters when those change (common
        random numbers), and carry gradient where it is wanted.

        Raises:
            ValueError: if `samples` is not a positive whole number.
        """
        return Draws.make(list(self.posteriors()), samples, generator)

    def outputs(
        self,
        x: Any,
        samples: int | None = None,
        draws: Draws | None = None,
        chunk_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Outputs under several draws, `(S, batch, …)`, differentiable: for training with more than one.

        Fresh draws use the family's estimator; given ones are plain draws of weights. A loss averaged over the result
        has the mean of the draws' gradients.

        Args:
            x: a tensor, a tuple of positional or a mapping of keyword arguments of the network.
            samples: number of fresh draws S.
            draws: draws made by `draw`; exactly one of the two is given.
            chunk_size: how many draws run at once (None: all).
            generator: source of noise for fresh draws.

        Raises:
            ValueError: unless exactly one of `samples` and `draws` is given, or for a number below 1.
        """
        if (samples is None) == (draws is None):
            raise ValueError("outputs wants exactly one of samples=S (fresh draws) and draws=bayes.draw(S)")
        args, kwargs = as_arguments(x)
        check_draws(draws)
        if draws is not None:
            return run_draws(self, args, kwargs, draws.components(self), len(draws), chunk_size)
        count = check_samples(samples)
        estimated = estimated_keys(self, None)
        estimator = None if estimated else "weights"
        with outputs_drawn_from(generator, estimated, device_of(self)):
            fresh = fresh_components(self, count, generator, estimated)
            return run_draws(self, args, kwargs, fresh, count, chunk_size, estimator)

    def predict(
        self,
        x: Any,
        samples: int = 32,
        draws: Draws | None = None,
        chunk_size: int | None = None,
        generator: torch.Generator | None = None,
        estimator: str = "weights",
        keep_draws: bool | None = None,
    ) -> Predictive:
        """The predictive distribution: the likelihood's, averaged over draws.

        Runs without gradient and with the evaluation behaviour of dropout and normalisation; every flag is put back.

        Args:
            x: a tensor, a tuple or mapping of arguments, or an iterable of batches (a `DataLoader`; of a batch
                `(input, target)` the input is used). Batches stream in bounded memory, under the same draws.
            samples: number of draws S.
            draws: use these instead (`bayes.draw(S)`).
            chunk_size: how many draws run at once; also bounds the memory for draws.
            generator: source of noise.
            estimator: "weights" makes every draw one function of all inputs. "local" and "flipout" draw outputs where
                the family offers them: the same predictive for each single input at lower cost, but no joint one.
            keep_draws: keep each draw's probabilities or means (None: for one batch yes, for a stream no).

        Raises:
            ValueError: no likelihood, `samples` below 1, or an empty loader.
        """
        return predict(
            self,
            x,
            samples=samples,
            draws=draws,
            chunk_size=chunk_size,
            generator=generator,
            estimator=estimator,
            keep_draws=keep_draws,
        )

    def propagate(
        self,
        x: Any,
        calibration: Any = None,
        rules: Any = "cvp",
        head: str = "sampled",
        covariance: Any = None,
    ) -> Predictive:
        """The predictive distribution by one pass that carries means and variances (`dubito.moments`).

        It carries `logits_mean` and `logits_variance` (in regression they are `mean` and `epistemic`). Without gradient
        and with evaluation behaviour; every flag is put back.

        Args:
            x: as in `predict`; batches stream.
            calibration: made by `dubito.moments.calibrate`, or None.
            rules: "cvp", "cvp-paper" (exactly the paper's), "streamlining" (first order), or a `RuleSet`.
            head: how the logits' moments become probabilities (`dubito.moments.head`).
            covariance: a `dubito.moments.LogitCovariance`, with the calibration it was fitted on; None takes logits
                as independent.

        Raises:
            NoRuleError: an operator without a rule; `dubito.moments.report` finds them beforehand.
            ValueError: no likelihood, an unknown rule set or head, an empty loader, or a calibration or covariance that
                was fitted for something else.
        """
        from dubito.moments.propagate import propagate

        return propagate(self, x, calibration=calibration, rules=rules, head=head, covariance=covariance)

    def sample(self, generator: torch.Generator | None = None) -> nn.Module:
        """One draw as an ordinary, frozen module in eval mode: a consistent function of its input.

        It is a copy: later training does not change it, and it can be saved or called like any network of its class.
        """
        check_generator(generator)
        values: Values = {}
        with torch.no_grad():
            for posterior in self.posteriors():
                drawn = posterior.realize(posterior.components(posterior.noise(generator)))
                values.update(posterior.dense(drawn))
        return self._plain_copy(values).requires_grad_(False).eval()

    def merge(self) -> nn.Module:
        """A plain copy of the network at the posterior mean.

        Raises:
            CapabilityError: where a family has no closed-form mean.
        """
        values: Values = {}
        with torch.no_grad():
            for posterior in self.posteriors():
                values.update(posterior.mean())
        return self._plain_copy(values).train(self.module.training)

    def _plain_copy(self, values: Values) -> nn.Module:
        with self._lock:
            return plain_copy(self.module, self._slots, values)

    # ---- divergences and likelihood -----------------------------------------------------------------------

    def kl(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """KL(q || prior), summed over all random weights, in nats; never scaled.

        For a loss that is a mean over examples, divide by the number of training examples.

        Args:
            method: "auto" (closed form, else the bound for mixtures, else Monte Carlo), "closed", "bound",
                "monte_carlo", or "stick_the_landing" (Monte Carlo whose gradient leaves out the score of q, of mean
                zero: Roeder et al. 2017).
            samples: draws for Monte Carlo (None: the family's own number).
            generator: source of Monte Carlo noise.

        Raises:
            CapabilityError: where a family's KL is infinite or undefined; the message names the objective to use.
        """
        values = list(self.kl_by_parameter(method, samples, generator).values())
        if not values:
            parameter = next(self.parameters(), None)
            return torch.zeros(()) if parameter is None else parameter.new_zeros(())
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    def kl_by_parameter(
        self, method: KLMethod = "auto", samples: int | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """The KL of each random parameter, by name; of a joint prior under the name of its first parameter."""
        with self._lock:
            result: dict[str, Tensor] = {}
            for posterior in self.posteriors():
                if not posterior.joint_prior:
                    result.update(posterior.kl(method, samples, generator))
            for prior in self.joint_priors:
                members = [p for p in self.posteriors() if prior in p.joint_prior]
                assert isinstance(prior, WeightPrior)
                result[members[0].slots[0].name] = joint_kl(prior, members, method, samples or 1, generator)
        return result

    def snapshot(self) -> Snapshot:
        """The distribution of the random weights as it is now, frozen, for `wasserstein`.

        Take it before training to keep the prior that an initialisation stands for; without it nothing of the prior
        stays in memory.
        """
        with self._lock:
            return Snapshot(dict(self.posterior.items()))  # type: ignore[arg-type]

    def wasserstein(self, other: Snapshot | BayesianModule) -> Tensor:
        """Squared 2-Wasserstein distance to a snapshot (or another such network), differentiable.

        In squared weight units, summed over the random weights; ordinary parameters do not count. Finite also where
        variances are zero and covariances singular, unlike a KL.

        Raises:
            CapabilityError: where a family has no closed form.
            ValueError: if `other` is of other random weights.
        """
        return squared_wasserstein(dict(self.posterior.items()), dict(other.posterior.items()))

    def nll(self, outputs: Any, y: Tensor) -> Tensor:
        """Mean negative log likelihood of the targets, over the batch (and over leading draws), in nats."""
        return self.require_likelihood().nll(self.select(outputs), y)

    def require_likelihood(self) -> Likelihood:
        """The likelihood, or an error that says how to give one.

        Raises:
            ValueError: if there is none.
        """
        if self.likelihood is None:
            raise ValueError(
                "no likelihood: classification and regression cannot be told apart from the outputs. Pass "
                "bayesianize(…, likelihood=dubito.Categorical()), or Bernoulli(), Gaussian(), HeteroscedasticGaussian()"
            )
        return self.likelihood

    def set_target_scale(self, shift: Tensor | None, scale: Tensor | None) -> None:
        """Regression targets were standardised as `(y - shift) / scale`; `predict` undoes it."""
        self.target_shift, self.target_scale = shift, scale

    @torch.no_grad()
    def rescale_spread_(self, factor: float) -> None:
        """Multiply all posterior standard deviations by `factor` >= 0, in place; 0 gives the mean network.

        Raises:
            ValueError: for a negative or non-finite factor.
        """
        if not (0 <= factor < float("inf")):
            raise ValueError(f"factor={factor!r} must be a finite number of at least 0")
        for posterior in self.posteriors():
            posterior.rescale_spread_(factor)

    # ---- being a module -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self.module, name)
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()
        watch_checkpointing()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("target_shift", "target_scale"):  # present only where targets were standardised
            if prefix + name in state_dict and getattr(self, name) is None:
                setattr(self, name, torch.empty_like(state_dict[prefix + name]))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tie_again(bayes: BayesianModule, _: Any) -> None:
    """`load_state_dict(assign=True)` gives every place of a tied parameter a tensor of its own."""
    for slot in bayes._slots.values():
        if slot.tied and slot.occupied:
            slot.put(slot.parameter)  # type: ignore[arg-type]


def joint_kl(
    prior: WeightPrior,
    members: Sequence[WeightPosterior],
    method: KLMethod,
    samples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """KL of several posteriors to one joint prior: its own closed form, else Monte Carlo."""
    if method in ("auto", "closed") and type(prior).kl is not WeightPrior.kl:
        return prior.kl(list(members))
    if method not in ("auto", "monte_carlo"):
        raise CapabilityError(f'{type(prior).__name__} offers no KL by method={method!r}; use "monte_carlo"')
    total: Tensor | None = None
    for _ in range(samples):
        weights: dict[str, Tensor] = {}
        for member in members:
            weights.update(member.draw((), generator))
        value = sum(
            (m.log_prob({s.name: weights[s.name] for s in m.slots}) for m in members),
            -prior.log_prob(weights),
        )
        total = value if total is None else total + value
    assert total is not None
    return total / samples
