"""Predictive: identities, closed forms, torch.distributions as oracle."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn import functional as F

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


@few
@given(draws_and_batch)
def test_classification_identities(sizes):
    s, b, c, seed = sizes
    p = classifier(seed, (s, b, c))
    assert torch.allclose(p.probs.sum(-1), torch.ones(b, dtype=torch.float64))
    assert torch.allclose(p.variance, p.aleatoric + p.epistemic)
    assert torch.allclose(p.variance, p.probs * (1 - p.probs))
    assert torch.allclose(p.aleatoric, (p.draws * (1 - p.draws)).mean(0))
    assert (p.mutual_information >= 0).all()
    assert torch.allclose(p.mutual_information, p.entropy - p.expected_entropy, atol=1e-12)
    assert (p.entropy <= math.log(c) + 1e-12).all()


@few
@given(draws_and_batch)
def test_bernoulli_is_a_categorical_of_two_classes(sizes):
    s, b, k, seed = sizes
    logits = logits_of((s, b, k), seed)
    p = Predictive.from_draws("bernoulli", logits, logits=True)
    q = Predictive.from_draws("categorical", torch.stack([torch.zeros_like(logits), logits], -1), logits=True)
    assert p.probs.shape == p.entropy.shape == p.variance.shape == (b, k)
    for name in ("probs", "aleatoric", "epistemic", "variance"):
        assert torch.allclose(getattr(p, name), getattr(q, name)[..., 1])
    for name in ("entropy", "expected_entropy", "mutual_information", "confidence"):
        assert torch.allclose(getattr(p, name), getattr(q, name))
    assert torch.equal(p.prediction, (p.probs > 0.5).long())


@few
@given(draws_and_batch)
def test_regression_identities(sizes):
    s, b, d, seed = sizes
    p = regression(seed, (s, b, d))
    assert torch.allclose(p.variance, p.aleatoric + p.epistemic)
    assert torch.allclose(p.std.square(), p.variance)
    assert (p.mutual_information >= 0).all()
    bound = 0.5 * torch.log(2 * math.pi * math.e * p.variance)
    assert (p.entropy <= bound + 1e-9).all()


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


def test_classification_closed_form():
    p = Predictive.from_draws("categorical", torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert p.entropy.item() == pytest.approx(math.log(2))
    assert p.expected_entropy.item() == 0.0
    assert p.mutual_information.item() == pytest.approx(math.log(2))
    assert p.variance.tolist() == p.epistemic.tolist() == [[0.25, 0.25]]
    assert p.aleatoric.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("shared", [True, False])
def test_regression_against_mixture_same_family(shared):
    means = logits_of((6, 4), scale=1.0)
    noise = torch.tensor(0.3, dtype=torch.float64) if shared else logits_of((6, 4), 5, 1.0).square() + 0.1
    p = Predictive.from_draws("regression", means, aleatoric=noise)
    weights = Categorical(torch.ones(4, 6, dtype=torch.float64))
    oracle = MixtureSameFamily(weights, Normal(means.T, noise.sqrt().expand_as(means).T))
    y = logits_of((4,), 9)
    assert torch.allclose(p.mean, oracle.mean)
    assert torch.allclose(p.variance, oracle.variance)
    assert torch.allclose(p.log_prob(y), oracle.log_prob(y))
    assert torch.allclose(oracle.cdf(p.quantile(0.1)), torch.full((4,), 0.1, dtype=torch.float64))
    low, high = p.interval(0.8)
    assert torch.equal(low, p.quantile(0.5 - 0.4))
    assert torch.allclose(oracle.cdf(high) - oracle.cdf(low), torch.full((4,), 0.8, dtype=torch.float64))
    x = oracle.sample((20_000,))
    monte_carlo = -oracle.log_prob(x)
    assert ((monte_carlo.mean(0) - p.entropy).abs() < 5 * monte_carlo.std(0) / 20_000**0.5).all()


def test_several_outcomes_of_a_datum_share_the_draw():
    means = logits_of((6, 4, 3), scale=1.0)
    p = Predictive.from_draws("regression", means, aleatoric=0.5)
    y = logits_of((4, 3), 2)
    per_draw = Normal(means, 0.5**0.5).log_prob(y).sum(-1)
    assert torch.allclose(p.log_prob(y), per_draw.logsumexp(0) - math.log(6))
    assert torch.allclose(p.log_prob(y, joint=True), per_draw.sum(1).logsumexp(0) - math.log(6))


def test_classification_log_prob_and_joint():
    logits, y = logits_of((6, 4, 3)), torch.tensor([0, 2, 1, 1])
    p = Predictive.from_draws("categorical", logits, logits=True)
    per_draw = -torch.stack([F.cross_entropy(draw, y, reduction="none") for draw in logits])
    assert torch.allclose(p.log_prob(y), per_draw.logsumexp(0) - math.log(6))
    assert torch.allclose(p.log_prob(y), p.probs[range(4), y].log())
    assert torch.allclose(p.log_prob(y, joint=True), per_draw.sum(1).logsumexp(0) - math.log(6))
    reduced = Predictive.from_draws("categorical", logits, logits=True, keep_draws=False)
    assert torch.allclose(reduced.log_prob(y), p.log_prob(y))


def test_bernoulli_log_prob_takes_soft_and_hard_targets():
    logits, y = logits_of((5, 4, 3)), torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).double()
    p = Predictive.from_draws("bernoulli", logits, logits=True)
    loss = F.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none")
    assert torch.allclose(p.log_prob(y), (-loss.sum(-1)).logsumexp(0) - math.log(5))
    certain = Predictive.from_moments("bernoulli", torch.tensor([0.0, 1.0]))
    assert certain.log_prob(torch.tensor([0, 1])).tolist() == [0.0, 0.0]
    assert certain.log_prob(torch.tensor([True, True])).tolist() == [-math.inf, 0.0]


def test_class_axis_elsewhere():
    logits = logits_of((5, 2, 3, 4, 6))
    p = Predictive.from_draws("categorical", logits, logits=True, dim=-3)
    last = Predictive.from_draws("categorical", logits.movedim(-3, -1), logits=True)
    y = torch.randint(3, (2, 4, 6), generator=torch.Generator().manual_seed(0))
    assert p.probs.shape == (2, 3, 4, 6)
    assert p.draws.shape == (5, 2, 3, 4, 6)
    assert p.entropy.shape == p.prediction.shape == (2, 4, 6)
    assert torch.allclose(p.probs, logits.softmax(-3).mean(0))
    assert torch.allclose(p.log_prob(y), last.log_prob(y))
    assert torch.allclose(p.epistemic.movedim(1, -1), last.epistemic)


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


def test_t10_total_variance_has_the_noise_in_it():
    means = torch.tensor([[0.0], [2.0]])
    p = Predictive.from_draws("regression", means, aleatoric=torch.tensor([[1.0], [3.0]]))
    assert (p.epistemic.item(), p.aleatoric.item(), p.variance.item()) == (1.0, 2.0, 3.0)
    samples = p.sample(40_000, torch.Generator().manual_seed(0))
    assert samples.var().item() == pytest.approx(3.0, rel=0.05)
    with pytest.raises(ValueError, match="needs aleatoric, the noise variance of the likelihood"):
        Predictive.from_draws("regression", means)


# -- numbers ---------------------------------------------------------------------------------------


def test_tiny_probabilities_have_finite_log_probabilities():
    p = Predictive.from_draws("categorical", torch.tensor([[[0.0, -500.0]], [[0.0, -700.0]]]), logits=True)
    assert p.probs[0, 1] == 0.0
    assert p.log_prob(torch.tensor([1])).item() == pytest.approx(-500 - math.log(2), rel=1e-6)
    assert p.entropy.item() == 0.0
    b = Predictive.from_draws("bernoulli", torch.tensor([[-500.0]]), logits=True)
    assert b.log_prob(torch.tensor([1])).item() == pytest.approx(-500)


@pytest.mark.parametrize("masked", [-math.inf, -500.0])
def test_a_probability_of_zero_adds_nothing_to_the_entropy(masked):
    p = Predictive.from_draws("categorical", torch.tensor([[[0.0, 1.0, masked]]]), logits=True)
    two = Predictive.from_draws("categorical", torch.tensor([[[0.0, 1.0]]]), logits=True)
    for name in ("entropy", "expected_entropy", "mutual_information"):
        assert torch.allclose(getattr(p, name), getattr(two, name))
    assert p.aleatoric.isfinite().all()


def test_entropy_has_a_gradient_where_a_probability_underflows():
    logits = torch.tensor([[[0.0, 1.0, -500.0]]], requires_grad=True)
    Predictive.from_draws("categorical", logits, logits=True).entropy.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0


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


def test_reduced_regression_is_the_gaussian_of_the_same_moments():
    p, full = regression(keep_draws=False), regression()
    assert p.draws is None
    assert p.samples == 8
    oracle = Normal(full.mean, full.variance.sqrt())
    y = logits_of((5, 2), 3)
    assert torch.allclose(p.log_prob(y), oracle.log_prob(y).sum(-1))
    assert torch.allclose(p.quantile(0.9), oracle.icdf(torch.tensor(0.9, dtype=torch.float64)))
    assert torch.allclose(p.entropy, oracle.entropy())
    assert torch.allclose(p.expected_entropy, full.expected_entropy)
    assert (p.mutual_information >= full.mutual_information - 1e-9).all()


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


@pytest.mark.parametrize(
    ("shift", "scale"), [(3.0, 4.0), (torch.tensor([1.0, -2.0]), torch.tensor([0.5, 10.0]))]
)
@pytest.mark.parametrize("keep", [True, False])
def test_affine_undoes_a_standardisation(shift, scale, keep):
    p = regression(keep_draws=keep)
    q = p.affine(shift, scale)
    s = torch.as_tensor(scale, dtype=torch.float64)
    z = logits_of((5, 2), 4)
    assert torch.allclose(q.mean, shift + scale * p.mean)
    assert torch.allclose(q.aleatoric, s**2 * p.aleatoric)
    assert torch.allclose(q.epistemic, s**2 * p.epistemic)
    log_scale = s.log().expand(2).sum()
    assert torch.allclose(q.log_prob(shift + scale * z), p.log_prob(z) - log_scale)
    assert torch.allclose(q.quantile(0.2), shift + scale * p.quantile(0.2), atol=1e-9)
    assert torch.allclose(q.entropy, p.entropy + s.log(), atol=1e-8)
    assert torch.allclose(q.mutual_information, p.mutual_information, atol=1e-8)
    if keep:
        assert torch.allclose(q.draws, shift + scale * p.draws)


def test_affine_refuses_what_would_change_the_shape():
    with pytest.raises(ValueError, match="one number, or one a feature"):
        regression().affine(torch.zeros(5), 1.0)
    with pytest.raises(ValueError, match="scale is zero"):
        regression().affine(0.0, 0.0)


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


@pytest.mark.parametrize("keep", [True, False])
def test_sampled_labels_have_the_predictive_frequencies(keep):
    p = classifier(keep_draws=keep)
    y = p.sample(20_000, torch.Generator().manual_seed(0))
    assert y.shape == (20_000, 5)
    assert y.dtype == torch.int64
    frequencies = F.one_hot(y, 3).double().mean(0)
    assert ((frequencies - p.probs).abs() < 5 * (p.variance / 20_000).sqrt() + 1e-9).all()
    assert torch.equal(
        y[:5], classifier(keep_draws=keep).sample(20_000, torch.Generator().manual_seed(0))[:5]
    )


def test_samples_of_kept_draws_belong_together():
    p = Predictive.from_draws("categorical", torch.tensor([[[1.0, 0.0]] * 4, [[0.0, 1.0]] * 4]))
    y = p.sample(100, torch.Generator().manual_seed(0))
    assert set(y.sum(1).tolist()) == {0, 4}
    with pytest.raises(ValueError, match="n is 0"):
        p.sample(0)


def test_sampled_numbers_have_the_predictive_moments():
    for p in (regression(), regression(keep_draws=False)):
        y = p.sample(40_000, torch.Generator().manual_seed(0))
        assert torch.allclose(y.mean(0), p.mean, atol=0.12)
        assert torch.allclose(y.var(0), p.variance, rtol=0.1)


# -- errors for people -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_classifier_says_what_it_has(name):
    with pytest.raises(NotAvailableError, match=rf"categorical predictive has no {name}. It has probs"):
        getattr(classifier(), name)
    assert not hasattr(classifier(), name)


@pytest.mark.parametrize(
    "call", [lambda p: p.interval(0.9), lambda p: p.quantile(0.5), lambda p: p.affine(0, 1)]
)
def test_a_classifier_has_no_intervals(call):
    with pytest.raises(NotAvailableError, match="It has probs, prediction"):
        call(classifier())


@pytest.mark.parametrize("name", ["probs", "confidence"])
def test_a_regression_says_what_it_has(name):
    with pytest.raises(NotAvailableError, match=rf"regression predictive has no {name}. It has mean"):
        getattr(regression(), name)


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
    ("y", "error", "message"),
    [
        (torch.tensor([0, 1, 2, 3, 0]), ValueError, r"y\[3\] is 3, but the outputs have 3 classes"),
        (torch.zeros(5), TypeError, "integer class labels"),
        (torch.zeros(5, 1, dtype=torch.long), ValueError, "squeeze"),
        (torch.zeros(4, dtype=torch.long), ValueError, r"need a y of shape \(5,\)"),
        ([0, 1, 2, 0, 0], TypeError, "y is a list"),
    ],
)
def test_targets_of_a_classifier_are_checked(y, error, message):
    with pytest.raises(error, match=message):
        classifier().log_prob(y)


def test_targets_of_a_regression_are_checked():
    p = Predictive.from_draws("regression", torch.zeros(3, 4, 1), aleatoric=1.0)
    with pytest.raises(ValueError, match=r"unsqueeze\(-1\).*not broadcast"):
        p.log_prob(torch.zeros(4))
    with pytest.raises(ValueError, match=r"y\[2, 0\] is nan"):
        p.log_prob(torch.tensor([[0.0], [0.0], [math.nan], [0.0]]))


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


def test_a_regression_without_noise_has_quantiles_but_no_density():
    p = Predictive.from_draws("regression", torch.tensor([[0.0], [1.0], [2.0]]), aleatoric=0.0)
    assert p.quantile(0.5).item() == pytest.approx(1.0)
    for name in ("entropy", "expected_entropy"):
        with pytest.raises(NotAvailableError, match="noise variance is zero"):
            getattr(p, name)
    with pytest.raises(NotAvailableError, match="noise variance is zero"):
        p.log_prob(torch.zeros(1))


def test_quantiles_of_several_probabilities_lead():
    p = regression()
    many = p.quantile([0.1, 0.5, 0.9])
    assert many.shape == (3, 5, 2)
    assert torch.equal(many[1], p.quantile(0.5))
    assert torch.equal(p.quantile(torch.tensor([0.5, 0.25]))[0], p.quantile(0.5))
    assert (many.diff(dim=0) > 0).all()
    with pytest.raises(ValueError, match="level is 95"):
        p.interval(95)
