"""Predictives of a classification against torch.nn.functional and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dubito.predictive import NotAvailableError, Predictive

draws_and_batch = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.integers(0, 10_000))
few = settings(max_examples=30, deadline=None)


def logits_of(shape, seed=0, scale=3.0, dtype=torch.float64):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classifier(seed=0, shape=(8, 5, 3), **kwargs):
    return Predictive.from_draws("categorical", logits_of(shape, seed), logits=True, **kwargs)


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


def test_classification_closed_form():
    p = Predictive.from_draws("categorical", torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert p.entropy.item() == pytest.approx(math.log(2))
    assert p.expected_entropy.item() == 0.0
    assert p.mutual_information.item() == pytest.approx(math.log(2))
    assert p.variance.tolist() == p.epistemic.tolist() == [[0.25, 0.25]]
    assert p.aleatoric.tolist() == [[0.0, 0.0]]


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


@pytest.mark.parametrize("bad", [[math.inf, 0.0, 0.0], [-math.inf, -math.inf, -math.inf]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logits_whose_softmax_is_nan_do_not_pass(bad, dtype):
    with pytest.raises(ValueError, match=r"softmax of draws holds 3 NaN, first at index 0, 1, 0"):
        Predictive.from_draws("categorical", torch.tensor([[[0.0, 1.0, 2.0], bad]], dtype=dtype), logits=True)
    masked = torch.tensor([[[0.0, -math.inf, 0.0]]])
    assert Predictive.from_draws("categorical", masked, logits=True).probs.tolist() == [[0.5, 0.0, 0.5]]
