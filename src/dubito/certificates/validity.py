"""Whether a PAC-Bayes bound may be asked of a network: a prior fixed before the data, a KL that is no estimate.

What can be seen from the posteriors is refused, with the remedy; what cannot (weights or priors made from other data)
the caller asserts by `prior_is_fixed=True`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributions import Distribution

from dubito.bayesian import BayesianModule, joint_kl
from dubito.certificates.certificate import RefusedError
from dubito.divergences import KLMethod
from dubito.learned_priors import LearnedScalePrior
from dubito.priors import ParameterPrior, Pretrained, WeightPrior
from dubito.weights.family import WeightPosterior
from dubito.weights.low_rank_factors import LowRankFactors, LowRankFactorsPosterior
from dubito.weights.rank_one import RankOnePosterior

_ASSERT = "if it was made without the data of this bound, say so by prior_is_fixed=True"
_METHODS: tuple[KLMethod, ...] = ("closed", "bound")


def require_fixed_prior(bayes: BayesianModule, asserted: bool) -> None:
    """Refuse a prior, or deterministic weights, that may come from the data.

    Args:
        bayes: the network.
        asserted: the caller's word that nothing but the posterior was made from the data of the bound.

    Raises:
        RefusedError: naming the parameter and the remedy.
        TypeError: for a plain network.
    """
    if not isinstance(bayes, BayesianModule):
        raise TypeError(
            f"bayes must be a BayesianModule, got {type(bayes).__name__}: a plain network has no posterior and no KL; "
            "make one by dubito.bayesianize"
        )
    for posterior in bayes.posteriors():
        if not posterior.joint_prior and not len(posterior.priors):
            raise RefusedError(
                f"{posterior.slots[0].name!r} ({type(posterior).__name__}) has no prior, so no KL and no bound: train "
                "it by the ELBO under MeanField, LowRankFactors, FullCovariance or Radial"
            )
        for name, prior in _priors(posterior):
            _refuse_learned(name, prior)
            if not asserted:
                _refuse_if_from_data(bayes, posterior, name, prior)
    if not asserted:
        _refuse_deterministic(bayes)


@torch.no_grad()
def exact_kl(bayes: BayesianModule) -> tuple[dict[str, float], bool]:
    """KL(Q‖P) in nats by parameter, in closed form or as an upper bound, and whether any is a bound.

    Raises:
        RefusedError: where only a Monte Carlo estimate exists, or the KL is infinite.
    """
    result: dict[str, float] = {}
    bounded = False
    for posterior in bayes.posteriors():
        if posterior.joint_prior:
            continue
        values, by_bound = _kl_of(posterior)
        bounded = bounded or by_bound
        result.update(values)
    for prior in bayes.joint_priors:
        assert isinstance(prior, WeightPrior)
        members = [p for p in bayes.posteriors() if prior in p.joint_prior]
        if type(prior).kl is WeightPrior.kl:
            raise RefusedError(
                f"{type(prior).__name__} has no closed-form KL, and a Monte Carlo one is no bound: override its "
                "kl(posterior), or use a Normal or ScaleMixture prior"
            )
        result[members[0].slots[0].name] = float(joint_kl(prior, members, "auto", 1, None))
    for name, value in result.items():
        if not math.isfinite(value):
            raise RefusedError(f"the KL of {name!r} is {value}: a posterior or prior there is degenerate")
    return {name: max(value, 0.0) for name, value in result.items()}, bounded


def _kl_of(posterior: WeightPosterior) -> tuple[dict[str, float], bool]:
    name = posterior.slots[0].name
    message = ""
    for method in _METHODS:
        try:
            values = posterior.kl(method)
        except NotImplementedError as error:  # CapabilityError is one
            message = message or str(error)
            continue
        return {n: float(v) for n, v in values.items()}, method == "bound"
    raise RefusedError(
        f"the KL of {name!r} has neither a closed form nor an upper bound here ({message}), and a Monte Carlo estimate "
        "certifies nothing: use a Normal or ScaleMixture prior with MeanField, LowRankFactors, FullCovariance or Radial"
    )


def _priors(posterior: WeightPosterior) -> Iterator[tuple[str, nn.Module]]:
    for prior in posterior.joint_prior:
        yield posterior.slots[0].name, prior
    for key, module in posterior.priors.items():
        name = posterior.slots[0].name if key in ("left", "right") else key.replace("/", ".")
        yield name, module


def _refuse_learned(name: str, prior: nn.Module) -> None:
    learned = [n for n, p in prior.named_parameters() if p.requires_grad]
    if learned:
        what = "EmpiricalBayes" if isinstance(prior, LearnedScalePrior) else type(prior).__name__
        raise RefusedError(
            f"the prior of {name!r} is learned with the posterior ({what}: {', '.join(learned)}), so it depends on the "
            "data. To make it valid: learn it on held-out data, freeze it by requires_grad_(False), train the "
            "posterior on the rest, bound on the rest with prior_is_fixed=True; or give a fixed prior, Normal(0.0, s)"
        )


def _refuse_if_from_data(
    bayes: BayesianModule, posterior: WeightPosterior, name: str, prior: nn.Module
) -> None:
    family = getattr(posterior, "family", None)
    own = getattr(family, "prior", None)
    if isinstance(posterior, RankOnePosterior):
        raise RefusedError(
            f"RankOne multiplies the weights {name!r} as they stand, for which the KL does not pay. If they were "
            "trained on the data of this bound, it does not hold: take weights trained on held-out data, and "
            f"train_weight=False; {_ASSERT}"
        )
    if isinstance(prior, LearnedScalePrior):
        raise RefusedError(f"the prior scale of {name!r} was learned (EmpiricalBayes); {_ASSERT}")
    if own == "pretrained" or isinstance(own, Pretrained) or _centred_on_values(posterior, prior):
        raise RefusedError(
            f"the prior of {name!r} is centred on given weights (dubito.Pretrained, or a Normal of tensors). If these "
            "were trained on the data of this bound, it depends on them: pretrain on held-out data, or give a fixed "
            f"prior, Normal(0.0, s); {_ASSERT}"
        )
    if isinstance(family, LowRankFactors) and isinstance(posterior, LowRankFactorsPosterior):
        given = isinstance(own, Distribution | ParameterPrior)  # a rule takes the factors' scale
        if family.init == "svd" and not given:
            raise RefusedError(
                f"LowRankFactors(init='svd') scaled the prior of {name!r} by the given weights. If these were trained "
                "on the data of this bound, it depends on them: give LowRankFactors a prior of fixed scale, such as "
                f"prior=Normal(0.0, s); {_ASSERT}"
            )
        if isinstance(family.rank, str) and family.init == "svd":
            raise RefusedError(
                f"the rank of {name!r} was chosen from the given weights (rank={family.rank!r}). Give a fixed rank, or "
                f"pay for the choice by choices=K; {_ASSERT}"
            )


def _centred_on_values(posterior: WeightPosterior, prior: nn.Module) -> bool:
    """Whether a prior has tensors of its own; of a parameter of one entry, a centre that is no round number."""
    if not isinstance(prior, ParameterPrior):
        return any(True for _ in prior.buffers())
    if any(True for _ in prior.buffers()):
        return True
    moments = prior.gaussian()
    if moments is None:
        return False
    single = any(slot.shape.numel() == 1 for slot in posterior.slots)
    return single and float(moments[0]) not in (0.0, 1.0)


def deterministic(bayes: BayesianModule) -> int:
    """How many parameters of the network have no posterior and are not trained: what made them cannot be seen."""
    random = {id(slot.parameter) for p in bayes.posteriors() for slot in p.slots if slot.occupied}
    return sum(not p.requires_grad and id(p) not in random for p in bayes.module.parameters())


def _refuse_deterministic(bayes: BayesianModule) -> None:
    random = {id(slot.parameter) for p in bayes.posteriors() for slot in p.slots if slot.occupied}
    trained = [name for name, p in bayes.module.named_parameters() if p.requires_grad and id(p) not in random]
    if trained:
        shown = ", ".join(trained[:3]) + (", …" if len(trained) > 3 else "")
        raise RefusedError(
            f"{len(trained)} trainable parameters have no posterior ({shown}): trained on the data, they are a choice "
            "that the KL does not pay for. Give them a family (dubito.MeanField()), freeze them before training, or, "
            "if they were not trained on the data of this bound, say so by prior_is_fixed=True"
        )
    for name, module in bayes.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise RefusedError(
                f"{name!r} ({type(module).__name__}) keeps statistics of the data, which the KL does not pay for: use "
                f"LayerNorm or GroupNorm, or statistics of held-out data; {_ASSERT}"
            )
