"""Which parameters an optimiser gets, and which of them weight decay may touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule


def parameter_groups(bayes: BayesianModule, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Optimiser groups that hold every trainable parameter exactly once.

    Decay on log sigma would pull every standard deviation to one, decay on S would break the implicit bias, so the
    parameters of spread, the likelihood's noise and learned priors are kept out of it.

    Args:
        bayes: the Bayesian module.
        lr: learning rate of both groups.
        weight_decay: for the means and ordinary parameters; the prior already decays the means under an ELBO, so 0
            is the rule.

    Returns:
        Two groups, "weights" (decayed) and "spread" (not), by the key `name`.

    Raises:
        TypeError: for a module that has no random weights.
        ValueError: for a learning rate or decay that is negative, or a module without trainable parameters.
    """
    if not hasattr(bayes, "posteriors"):
        raise TypeError(
            f"bayes must be a BayesianModule, got {type(bayes).__name__}: an ordinary module's parameters() go to the "
            "optimizer as they are"
        )
    if not lr > 0:
        raise ValueError(f"lr={lr!r} must be positive")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay!r} must be at least 0")
    undecayed = {id(p) for posterior in bayes.posteriors() for p in posterior.spread_parameters()}
    for part in (bayes.likelihood, bayes.joint_priors, *(p.priors for p in bayes.posteriors())):
        undecayed |= {id(p) for p in part.parameters()} if part is not None else set()
    trainable = [p for p in bayes.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the module has no trainable parameter (requires_grad is False everywhere)")
    weights = [p for p in trainable if id(p) not in undecayed]
    spread = [p for p in trainable if id(p) in undecayed]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
        {"name": "spread", "params": spread, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
