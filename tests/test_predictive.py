"""Predictive: identities, closed forms, torch.distributions as oracle."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from dubito.predictive import NotAvailableError, Predictive

draws_and_batch = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.integers(0, 10_000))
few = settings(max_examples=30, deadline=None)


def logits_of(shape, seed=0, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classifier(seed=0, shape=(8, 5, 3), **kwargs):
    return Predictive.from_draws("categorical", logits_of(shape, seed), logits=True, **kwargs)


def regression(seed=0, shape=(8, 5, 2), **kwargs):
    noise = 0.2 + logits_of(shape, seed + 1, 1.0).square()
    return Predictive.from_draws("regression", logits_of(shape, seed), aleatoric=noise, **kwargs)


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "regression"])
def test_identical_draws_hold_no_information(kind, dtype):
    one = logits_of((1, 6, 4), dtype=dtype).expand(9, 6, 4)
    if kind == "regression":
        p = Predictive.from_draws(kind, one, aleatoric=0.3)
    else:
        p = Predictive.from_draws(kind, one, logits=True)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert p.mutual_information.abs().max() < 4 * tolerance
    assert p.epistemic.abs().max() < tolerance


# -- closed forms and oracles ----------------------------------------------------------------------


def test_t09_probabilities_are_averaged_not_logits_and_one_draw_gives_no_nan():
    logits = torch.tensor([[[4.0, 0.0]], [[-6.0, 0.0]]])
    p = Predictive.from_draws("categorical", logits, logits=True)
    assert torch.allclose(p.probs, logits.softmax(-1).mean(0))
    assert not torch.allclose(p.probs, logits.mean(0).softmax(-1), atol=0.1)
    for kind, extra in (("categorical", {"logits": True}), ("regression", {"aleatoric": 0.1})):
        one = Predictive.from_draws(kind, logits[:1], **extra)
        for name in (
            "variance",
            "aleatoric",
            "epistemic",
            "entropy",
            "expected_entropy",
            "mutual_information",
        ):
            assert getattr(one, name).isfinite().all(), name
        assert (one.epistemic == 0).all()
        assert (one.mutual_information == 0).all()


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_float32_and_double_stays(dtype):
    logits = logits_of((4, 3, 5)).to(dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    p = Predictive.from_draws("categorical", logits, logits=True)
    r = Predictive.from_draws("regression", logits, aleatoric=torch.tensor(0.5, dtype=dtype))
    assert p.probs.dtype == p.entropy.dtype == r.mean.dtype == r.variance.dtype == expected
    assert torch.allclose(p.probs, logits.to(expected).softmax(-1).mean(0))


def test_nan_is_refused_where_it_enters():
    logits = logits_of((4, 3, 5))
    logits[2, 1, 3] = math.nan
    with pytest.raises(ValueError, match="draws holds 1 NaN, first at index 2, 1, 3"):
        Predictive.from_draws("categorical", logits, logits=True)
    with pytest.raises(ValueError, match="center holds 1 NaN"):
        Predictive.from_moments("regression", torch.tensor([math.nan]), epistemic=1.0, aleatoric=1.0)
    with pytest.raises(ValueError, match="aleatoric holds NaN or negative"):
        Predictive.from_draws("regression", logits[:1], aleatoric=math.nan)


# -- moments, reduction ----------------------------------------------------------------------------


def test_reduction_holds_nothing_with_a_draw_dimension():
    s = 50
    for p in (classifier(shape=(s, 5, 3), keep_draws=False), regression(shape=(s, 5, 2), keep_draws=False)):
        held = [value for value in vars(p).values() if isinstance(value, torch.Tensor)]
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) < 8 * s * 5 * 2


def test_moments_agree_with_the_draws_they_were_taken_from():
    full = classifier()
    p = Predictive.from_moments(
        "categorical", full.probs, epistemic=full.epistemic, expected_entropy=full.expected_entropy
    )
    for name in (
        "probs",
        "entropy",
        "mutual_information",
        "variance",
        "aleatoric",
        "epistemic",
        "confidence",
    ):
        assert torch.allclose(getattr(p, name), getattr(full, name)), name
    assert p.samples is None
    q = Predictive.from_moments("regression", torch.zeros(3), epistemic=torch.ones(3), aleatoric=2.0)
    assert q.variance.tolist() == [3.0] * 3
    assert q.mutual_information[0].item() == pytest.approx(0.5 * math.log(3 / 2))


def test_moments_without_a_part_say_what_to_give():
    p = Predictive.from_moments("bernoulli", torch.tensor([0.2, 0.5]), logits_mean=torch.zeros(2))
    assert torch.allclose(p.variance, torch.tensor([0.16, 0.25]))
    for name in ("epistemic", "aleatoric", "expected_entropy", "mutual_information"):
        with pytest.raises(NotAvailableError, match="give it to from_moments"):
            getattr(p, name)
    assert torch.equal(p[1:].logits_mean, torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epistemic": torch.full((1, 2), 0.3)}, "exceeds the variance p"),
        ({"expected_entropy": torch.tensor([0.9])}, "exceeds the entropy"),
        ({"expected_entropy": torch.tensor([[0.1]])}, "one for each outcome"),
        ({"logits_mean": torch.zeros(7, 2)}, "the batch comes first: 1"),
        ({"aleatoric": 0.1}, "aleatoric is for regression"),
        ({"dim": 0}, "counted from the end"),
    ],
)
def test_moments_that_contradict_each_other(change, message):
    with pytest.raises(ValueError, match=message):
        Predictive.from_moments("categorical", torch.tensor([[0.5, 0.5]]), **change)


# -- container -------------------------------------------------------------------------------------

NAMES = {
    "categorical": ("probs", "entropy", "expected_entropy", "aleatoric", "epistemic", "prediction"),
    "regression": ("mean", "entropy", "expected_entropy", "aleatoric", "epistemic", "variance"),
}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("make", [classifier, regression])
def test_concatenation_of_parts_is_the_whole(make, keep):
    whole = make(keep_draws=keep)
    joined = Predictive.concatenate([whole[:2], whole[2:3], whole[3:]])
    assert len(joined) == len(whole) == 5
    assert joined.samples == 8
    for name in NAMES[whole.kind]:
        assert torch.allclose(getattr(joined, name), getattr(whole, name), atol=1e-9), name
    if keep:
        assert torch.equal(joined.draws, whole.draws)
        y = whole.prediction
        assert torch.allclose(joined.log_prob(y, joint=True), whole.log_prob(y, joint=True))


def test_streamed_batches_are_the_whole():
    logits = logits_of((8, 5, 3))
    parts = [Predictive.from_draws("categorical", logits[:, i : i + 2], logits=True) for i in (0, 2, 4)]
    assert torch.equal(Predictive.concatenate(parts).probs, classifier().probs)


def test_concatenation_refuses_what_differs():
    with pytest.raises(ValueError, match="empty"):
        Predictive.concatenate([])
    for other in (regression(), classifier(keep_draws=False), classifier(shape=(7, 5, 3))):
        with pytest.raises(ValueError, match="made in one way"):
            Predictive.concatenate([classifier(), other])


@pytest.mark.parametrize("make", [classifier, regression])
def test_indexing_runs_along_the_batch(make):
    p = make()
    center = p.prediction
    mask = torch.tensor([True, False, True, False, False])
    for index in (slice(1, 4), [3, 0], torch.tensor([3, 0]), mask, mask.tolist(), mask.numpy()):
        at = index if isinstance(index, slice) else torch.as_tensor(index)
        assert torch.equal(p[index].prediction, center[at])
        assert torch.equal(p[index].draws, p.draws[:, at])
    assert len(p[-1]) == 1
    assert torch.equal(p[-1].prediction, center[-1:])
    with pytest.raises(IndexError, match="outside a batch of 5"):
        p[5]
    assert [len(part) for part in p] == [1] * 5


@pytest.mark.parametrize("make", [classifier, regression])
def test_frozen_copied_moved_detached(make):
    p = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.samples = 3
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), p.to("cpu"), p.cpu(), p.detach()):
        assert torch.equal(other.prediction, p.prediction)
        assert (other.kind, other.samples) == (p.kind, 8)
    assert p.to("meta").draws.device.type == "meta"
    assert repr(p).startswith(f"Predictive({p.kind}")
    assert len(repr(p)) < 80
    assert "reduced" in repr(make(keep_draws=False))


def test_predictive_is_differentiable_until_detached():
    logits = logits_of((3, 4, 2)).requires_grad_()
    p = Predictive.from_draws("categorical", logits, logits=True)
    p.log_prob(torch.tensor([0, 1, 1, 0])).sum().backward()
    assert logits.grad.abs().sum() > 0
    assert not p.detach().probs.requires_grad


# -- outcomes --------------------------------------------------------------------------------------


# -- errors for people -----------------------------------------------------------------------------


def test_joint_needs_consistent_draws():
    y = torch.zeros(5, dtype=torch.long)
    with pytest.raises(NotAvailableError, match="keep_draws=True"):
        classifier(keep_draws=False).log_prob(y, joint=True)
    with pytest.raises(NotAvailableError, match="independent noise per example"):
        classifier(consistent=False).log_prob(y, joint=True)
    assert classifier(consistent=False).log_prob(y).shape == (5,)
    mixed = Predictive.concatenate([classifier(), classifier(consistent=False)])
    assert not mixed.consistent


@pytest.mark.parametrize(
    ("kind", "draws", "error", "message"),
    [
        ("gaussian", torch.zeros(2, 3), ValueError, "one of categorical, bernoulli, regression"),
        ("categorical", torch.zeros(2, 3), ValueError, r"needs \(draws, batch, classes\)"),
        ("categorical", torch.zeros(0, 2, 3), ValueError, "no draws"),
        ("categorical", torch.zeros(2, 2, 3), ValueError, "does not sum to one"),
        ("categorical", -torch.ones(2, 2, 3), ValueError, "logits=True"),
        ("bernoulli", torch.ones(2, 3, dtype=torch.long), TypeError, "floating point"),
    ],
)
def test_draws_that_are_none(kind, draws, error, message):
    with pytest.raises(error, match=message):
        Predictive.from_draws(kind, draws)
