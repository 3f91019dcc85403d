"""Objectives against their definitions, term by term."""

import math

import pytest
import torch

import dubito
from dubito.amortised import BNNProcess
from dubito.amortised.objectives import OBJECTIVES, avi, elbo, npml, npvi, pp_avi
from dubito.amortised.tasks import TaskBatch


def setting() -> tuple[BNNProcess, TaskBatch, TaskBatch]:
    torch.manual_seed(0)
    process = BNNProcess(1, 1, (5,), likelihood=dubito.Gaussian(0.3)).double()
    x = torch.randn(2, 9, 1, dtype=torch.float64)
    pairs = [(a, torch.sin(a)) for a in x]
    context = process.gather([(a[:5], b[:5]) for a, b in pairs])
    return process, context, process.gather([(a[5:], b[5:]) for a, b in pairs])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_pp_avi_is_the_joint_predictive_of_the_targets_plus_the_elbo_of_the_context() -> None:
    process, context, target = setting()
    value = pp_avi(process, context, target, 6, generator=generator())
    drawn = process.infer(context, 6, generator=generator())
    joint = process.log_likelihood(drawn.weights, target).sum(-1)
    torch.testing.assert_close(value.predictive, joint.logsumexp(0) - math.log(6))
    fit = process.log_likelihood(drawn.weights, context).sum(-1)
    torch.testing.assert_close(value.elbo, (fit - drawn.kl).mean(0))
    torch.testing.assert_close(value.loss, -(value.predictive + value.elbo).mean())
    alone = npml(process, context, target, 6, generator=generator())
    torch.testing.assert_close(alone.value, value.predictive)
    bound = elbo(process, context, 6, generator=generator())
    torch.testing.assert_close(bound.value, value.elbo)


def test_per_point_divides_both_terms_by_the_points_of_the_task() -> None:
    process, context, target = setting()
    whole = pp_avi(process, context, target, 6, generator=generator())
    each = pp_avi(process, context, target, 6, per_point=True, generator=generator())
    torch.testing.assert_close(each.predictive, whole.predictive / 9)
    torch.testing.assert_close(each.elbo, whole.elbo / 9)


def test_avi_is_the_elbo_of_everything() -> None:
    process, context, target = setting()
    value = avi(process, context, target, 6, generator=generator())
    expected = elbo(process, context.joined(target), 6, generator=generator())
    torch.testing.assert_close(value.value, expected.value)


def test_npvi_measures_both_posteriors_along_the_same_draws() -> None:
    process, context, target = setting()
    value = npvi(process, context, target, 5, generator=generator())
    noise = process.noise(5, 2, generator())
    whole = context.joined(target)
    drawn = process.infer(whole, noise=noise)
    kl = torch.zeros(5, 2, dtype=torch.float64)
    for index, layer in enumerate(process.layers):
        prior = layer.prior.gaussian()
        before = drawn.weights[:index]
        q, base = (
            layer.conditional(prior, process.natural_terms(index, b, *before)) for b in (whole, context)
        )
        kl = kl + q.kl(base)
    torch.testing.assert_close(value.kl, kl.mean(0))
    fit = process.log_likelihood(drawn.weights, target).sum(-1)
    torch.testing.assert_close(value.value, (fit - kl).mean(0))


def test_npvi_of_no_targets_is_nothing() -> None:
    process, context, target = setting()
    nothing = target.part(slice(0, 0))
    value = npvi(process, context, nothing, 3)
    torch.testing.assert_close(value.value, torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_refuses_targets_in_the_context_and_trains_everything(name: str) -> None:
    process, context, target = setting()
    with pytest.raises(ValueError, match="task 0: 5 of its targets"):
        OBJECTIVES[name](process, context, context)
    OBJECTIVES[name](process, context, target, 3).loss.backward()
    for parameter in process.inference.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
    with pytest.raises(ValueError, match="go together"):
        OBJECTIVES[name](process, context, process.gather([(torch.zeros(1, 1), torch.zeros(1, 1))]))
