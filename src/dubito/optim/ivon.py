"""IVON: an optimizer whose state is a Gaussian over the weights.

Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks", algorithm 1: natural-gradient
variational inference of q(w) = N(m, diag(1 / (ess (h + delta)))) at about the cost of Adam. The parameters are the
means m; h estimates the Hessian's diagonal from the gradients at drawn weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from dubito.optim.ivon_average import average_over_processes
from dubito.optim.ivon_draws import GatheredDraws
from dubito.optim.ivon_noise import NoiseSource, processes
from dubito.optim.ivon_settings import (
    IVONOptions,
    base_seed,
    check_group,
    check_options,
    label_of,
    settings_of,
)
from dubito.optim.ivon_state import State, ensure_state, mean_of, restore_tensors
from dubito.optim.ivon_update import average_gradients_into, curvatures, sds, step_means
from dubito.optim.tensor_groups import alike, use_foreach

Group = dict[str, Any]


class IVON(Optimizer):
    """Improved variational online Newton.

    The loss is the mean over examples (in nats: a negative log likelihood), `ess` the number of training examples; the
    prior is N(0, 1 / (ess · weight_decay)). Every forward and backward pass runs under drawn weights:

        optimizer = dubito.IVON(model.parameters(), lr=0.1, ess=n_train)
        for x, y in loader:
            optimizer.zero_grad()
            with optimizer.sampled_params():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        bayes = dubito.from_ivon(model, optimizer, likelihood=dubito.Categorical())

    `dubito.fit(model, loader, likelihood=…, optimizer=lambda groups: dubito.IVON(groups, lr=0.1, ess=n_train))` does
    the same. One block is one draw. Several blocks before a step are several draws, whose gradients are averaged: do
    not divide the loss by their number. Several backward calls within a block add up, as usual: gradient accumulation
    with one draw; there divide by their number.

    Outside a block the parameters are the means. `zero_grad` outside a block also forgets the draws since the last
    step; within a block it clears that block's gradients only. A gradient scaler may unscale, and gradients be clipped,
    between block and step: what is done to a gradient is done to its estimate of the curvature. A gradient of None
    leaves its parameter, momentum and curvature as they are; a frozen parameter is not drawn.

    Over several processes the gradients are averaged here, with the curvature (`synchronize`): every process draws its
    own noise, so an average made before, as by `DistributedDataParallel`, would lose curvature. Leave that wrapper
    out, or run backward in its `no_sync()`.

    State is kept in float32 for float16 and bfloat16 parameters, with a float32 copy of the mean, as steps are smaller
    than their rounding. Where standard deviations are below it too (0.4 % of a weight in bfloat16), a draw cannot be
    told from the mean and no curvature is seen: train such weights in float32, under autocast.

    Noise is a function of seed, process and draw: a run taken up from `state_dict` is bit-equal to one that was not
    stopped.

    Args:
        params: parameters, `named_parameters()`, or groups, each with settings of its own.
        lr: learning rate; 0.1 for training from the start is the paper's, less for fine-tuning.
        ess: effective sample size, the number of training examples (more: a colder posterior).
        hess_init: h at the beginning, > 0; it sets the first standard deviations, `(ess (hess_init + delta)) ** -0.5`.
        betas: decay of momentum and curvature. Short runs want a smaller second one: 1 - beta2 should be several times
            the reciprocal of the number of steps.
        weight_decay: delta, the prior's precision over ess.
        clip_radius: bound of each entry of the preconditioned update; infinity: none.
        options: see `IVONOptions`.

    Raises:
        TypeError, ValueError: for a setting outside its range, naming it.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99999),
        weight_decay: float = 1e-4,
        clip_radius: float = float("inf"),
        **options: Unpack[IVONOptions],
    ) -> None:
        check_options(options)
        self._seed = base_seed(options.get("seed"))
        self._distributed = options.get("distributed")
        self._drawn = 0  # draws so far, which number the noise
        self._inside = False
        self._checked_processes = False
        self._gathered = GatheredDraws()
        defaults = {
            "lr": lr,
            "ess": ess,
            "hess_init": hess_init,
            "betas": betas,
            "weight_decay": weight_decay,
            "clip_radius": clip_radius,
            "mc_samples": options.get("mc_samples", 1),
            "rescale_lr": options.get("rescale_lr", True),
            "foreach": options.get("foreach"),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with settings of their own where `param_group` has any.

        Raises:
            TypeError, ValueError: for a setting outside its range.
            RuntimeError: inside a block, where the new ones would not be drawn.
        """
        self._refuse_inside("add_param_group")
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            draws = {group["mc_samples"] for group in self.param_groups}
            if len(draws) > 1:
                raise ValueError(
                    f"mc_samples must be the same in all groups, got {sorted(draws)}: a draw is of all parameters."
                )
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @property
    def mc_samples(self) -> int:
        """Draws a step, where this optimizer or `dubito.fit` makes them."""
        return int(self.param_groups[0]["mc_samples"])

    # ---- drawing ----------------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, train: bool = True) -> Iterator[None]:
        """A block in which the parameters are one draw from the posterior; the means are back after it.

        They come back whatever happens. After an exception the draw and its gradients are forgotten; those of earlier
        draws stay.

        Args:
            train: take the gradients for the next step. False: only look, as for a prediction; `.grad` is left alone.

        Raises:
            RuntimeError: inside another block.
        """
        self._refuse_inside("sampled_params")
        parameters = [p for group in self.param_groups for p in group["params"]]
        aside = self._gathered.set_aside(parameters) if train else {}
        means: dict[Tensor, Tensor] = {}
        finished, self._inside = False, True
        try:
            noise = self._perturb(means)
            yield
            finished = True
        finally:
            with torch.no_grad():
                for p, mean in means.items():
                    p.copy_(mean)
            self._inside = False
            if train and not finished:
                for p in parameters:
                    p.grad = aside.get(p)
        if train:
            with torch.no_grad():
                self._gathered.add(noise, aside)

    @torch.no_grad()
    def _perturb(self, means: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Put a draw in the parameters' place; fills `means` as it goes, and gives the noise."""
        source, noise = NoiseSource(self._seed, processes()[0], self._drawn), {}
        self._drawn += 1
        for group in self.param_groups:
            settings, drawn = settings_of(group), [p for p in group["params"] if p.requires_grad]
            states = [self._state(group, p) for p in drawn]
            for kept, chosen in alike(drawn, states):
                foreach = use_foreach(group["foreach"], kept)
                spread = sds([s["hessian"] for s in chosen], settings.ess, settings.weight_decay, foreach)
                for p, state, sd in zip(kept, chosen, spread, strict=True):
                    eps, mean = source.like(sd), mean_of(state, p)
                    means[p] = p.detach().clone()
                    if mean.dtype == p.dtype:
                        p.addcmul_(sd, eps)
                    else:
                        p.copy_(torch.addcmul(mean, sd, eps))
                    noise[p] = eps
        return noise

    # ---- stepping ---------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step from the draws since the last one.

        Args:
            closure: computes the loss with gradients (zeroing them first, as for any torch optimizer); it is called
                under each of `mc_samples` draws.

        Returns:
            The mean of what the closure returned, or None.

        Raises:
            RuntimeError: without a draw, inside a block, or where a gradient or the curvature is not finite; nothing is
                changed then.
        """
        self._refuse_inside("step")
        loss = None if closure is None else self._evaluate(closure)
        if self._gathered.count == 0:
            raise RuntimeError(
                "IVON.step() without a draw: run forward and backward inside `with optimizer.sampled_params():`, or "
                "pass a closure"
            )
        try:
            self.synchronize()
            with torch.no_grad():
                work = [(group, *self._next(group)) for group in self.param_groups]
                self._check_finite(work)
                for group, parameters, hessians in work:
                    self._take(group, parameters, hessians)
        finally:
            self._gathered.clear()
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        total = None
        for _ in range(self.mc_samples):
            with torch.enable_grad(), self.sampled_params():
                loss = closure()
            loss = loss.detach() if isinstance(loss, Tensor) else loss
            total = loss if total is None else total + loss
        return None if total is None else total / self.mc_samples

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average gradients and curvature over the processes; `step` does it where it was not done before.

        Call it before anything that looks at the gradients and must find the same in all processes: a gradient scaler,
        a norm for clipping. With one process it does nothing.

        Raises:
            RuntimeError: where all processes bring the same gradients, which were therefore averaged before.
        """
        world = 1 if self._distributed is False else processes()[1]
        if world == 1 or self._gathered.synchronized or self._gathered.count == 0:
            return
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        same = average_over_processes(self._gathered, parameters, world)
        if same and not self._checked_processes:
            raise RuntimeError(
                "all processes came with the same gradients though each drew its own weights: they were averaged "
                "before (DistributedDataParallel does that), which loses the curvature. Use the bare module, or run "
                "backward inside model.no_sync(); IVON averages by itself"
            )
        self._checked_processes = True

    def _next(self, group: Group) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters with a gradient, and their next curvatures; the state is not changed yet."""
        parameters = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(
                    f"IVON has no rule for sparse gradients: {self._label(p)} (use sparse=False)"
                )
        settings, products = settings_of(group), self._gathered.products(parameters)
        hessians: dict[Tensor, Tensor] = {}
        for kept, product in alike(parameters, products):
            before = [self._state(group, p)["hessian"] for p in kept]
            new = curvatures(before, product, settings, use_foreach(group["foreach"], kept))
            hessians.update(zip(kept, new, strict=True))
        return parameters, [hessians[p] for p in parameters]

    def _take(self, group: Group, parameters: list[Tensor], hessians: list[Tensor]) -> None:
        settings = settings_of(group)
        for kept, new in alike(parameters, hessians):
            foreach, states = use_foreach(group["foreach"], kept), [self._state(group, p) for p in kept]
            for state, h in zip(states, new, strict=True):
                state["hessian"], state["step"] = h, state["step"] + 1
            momenta = [state["momentum"] for state in states]
            gradients = [p.grad.to(m.dtype) for p, m in zip(kept, momenta, strict=True)]
            average_gradients_into(momenta, gradients, settings.beta1, foreach)
            means = [mean_of(state, p) for p, state in zip(kept, states, strict=True)]
            step_means(means, momenta, new, [state["step"] for state in states], settings, foreach)
            for p, mean in zip(kept, means, strict=True):
                if mean.dtype != p.dtype:
                    p.copy_(mean)

    def _check_finite(self, work: list[tuple[Group, list[Tensor], list[Tensor]]]) -> None:
        """A gradient that is not finite makes a curvature that is not, so one sum a parameter tells of both."""
        found = [
            (p, h) for _, parameters, hessians in work for p, h in zip(parameters, hessians, strict=True)
        ]
        sums = [h.sum() for _, h in found]
        if all(bool(torch.stack(same).isfinite().all()) for (same,) in alike(sums)):
            return
        for p, h in found:
            bad = "curvature" if not bool(h.isfinite().all()) else ""
            bad = "gradient" if p.grad is not None and not bool(p.grad.isfinite().all()) else bad
            if bad:
                raise RuntimeError(
                    f"IVON.step(): the {bad} of {self._label(p)} is NaN or infinite; the step was not taken. Look at "
                    "the loss and the data, lower lr, raise hess_init, or bound the updates by clip_radius"
                )

    # ---- gradients and state ----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; outside a block, forget the draws since the last step too."""
        if not self._inside:
            self._gathered.clear()
        super().zero_grad(set_to_none)

    def posterior_sd(self, parameter: Tensor) -> Tensor:
        """Standard deviations of a parameter's posterior, in its shape and at least float32.

        Raises:
            KeyError: it is not among this optimizer's parameters.
        """
        group = self.group_of(parameter)
        settings = settings_of(group)
        (sd,) = sds([self._state(group, parameter)["hessian"]], settings.ess, settings.weight_decay, False)
        return sd

    def posterior_mean(self, parameter: Tensor) -> Tensor:
        """The mean of a parameter: itself, or for half precision the float32 mean it is rounded from.

        Raises:
            RuntimeError: inside a block.
        """
        self._refuse_inside("posterior_mean")
        return mean_of(self._state(self.group_of(parameter), parameter), parameter)

    def group_of(self, parameter: Tensor) -> Group:
        """The group that holds a parameter.

        Raises:
            KeyError: none does.
        """
        for group in self.param_groups:
            if any(p is parameter for p in group["params"]):
                return group
        raise KeyError(f"a parameter of shape {tuple(parameter.shape)} is not among the optimizer's")

    @property
    def inside_sampled_params(self) -> bool:
        """Whether the parameters hold a draw at this moment."""
        return self._inside

    def state_dict(self) -> dict[str, Any]:
        """Everything but the means, which are the parameters: momentum, curvature, step, and where the noise is.

        Draws whose step was not taken yet are not part of it.

        Raises:
            RuntimeError: inside a block.
        """
        self._refuse_inside("state_dict")
        return {**super().state_dict(), "noise": {"seed": self._seed, "draws": self._drawn}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; in another process it goes on with that process's noise.

        Raises:
            ValueError: it is not of an IVON, or of other groups.
            RuntimeError: inside a block.
        """
        self._refuse_inside("load_state_dict")
        if "noise" not in state_dict:
            raise ValueError(
                "the state is not of an IVON: it has no 'noise' (keys: " + ", ".join(state_dict) + ")"
            )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "noise"})
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, own, strict=True):
            restore_tensors(self.state[p], state_dict["state"].get(key, {}), p)
        self._seed, self._drawn = int(state_dict["noise"]["seed"]), int(state_dict["noise"]["draws"])
        self._gathered.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("a copy")
        own = {
            k: self.__dict__[k] for k in ("_seed", "_distributed", "_drawn", "_inside", "_checked_processes")
        }
        return {**super().__getstate__(), **own, "_gathered": GatheredDraws()}

    def _state(self, group: Group, p: Tensor) -> State:
        return ensure_state(self.state[p], p, group["hess_init"])

    def _label(self, parameter: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, p in enumerate(group["params"]):
                if p is parameter:
                    return label_of(group, index, number)
        return "a parameter"

    def _refuse_inside(self, what: str) -> None:
        if getattr(self, "_inside", False):
            raise RuntimeError(
                f"IVON: {what} inside `with optimizer.sampled_params():`, where the parameters are a draw; leave the "
                "block first"
            )
