"""Draws and prediction: one shot, streamed or in chunks the same; flags and seeds; errors."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.monte_carlo import as_arguments, evaluating


def network(family: dubito.Family | None = None, **options: Any) -> dubito.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    options = {"likelihood": dubito.Categorical(), **options}
    return dubito.bayesianize(net, family or dubito.MeanField(scale=0.5), **options)


def data(n: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def seed(value: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(value)


# --------------------------------------------------------------------------------------------------------- draws


def test_the_first_of_more_draws_are_the_same_draws() -> None:
    bayes, (x, _) = network(), data()
    bayes.module.eval()
    few, many = bayes.draw(2, seed()), bayes.draw(5, seed())
    torch.testing.assert_close(bayes.outputs(x, draws=few), bayes.outputs(x, draws=many)[:2])
    a, b = bayes.predict(x, samples=2, generator=seed()), bayes.predict(x, samples=5, generator=seed())
    assert a.draws is not None
    assert b.draws is not None
    torch.testing.assert_close(a.draws, b.draws[:2])


def test_draws_can_be_sliced() -> None:
    bayes, (x, _) = network(), data()
    bayes.module.eval()
    draws = bayes.draw(4, seed())
    whole = bayes.outputs(x, draws=draws)
    assert len(draws[1:3]) == 2
    assert len(draws[-1]) == 1
    torch.testing.assert_close(bayes.outputs(x, draws=draws[1:3]), whole[1:3])
    torch.testing.assert_close(bayes.outputs(x, draws=draws[-1]), whole[3:])
    with pytest.raises(IndexError, match="draw 4 of 4"):
        draws[4]


def test_draws_are_noise_and_follow_the_parameters() -> None:
    """Common random numbers: the same draws after a step are functions of the new posterior, with gradient."""
    bayes, (x, _) = network(), data()
    bayes.module.eval()
    draws = bayes.draw(2, seed())
    before = bayes.outputs(x, draws=draws).detach()
    with torch.no_grad():
        bayes.module[4].bias.add_(1.0)
    torch.testing.assert_close(bayes.outputs(x, draws=draws), before + 1.0)
    bayes.outputs(x, draws=draws).sum().backward()
    assert all(p.grad is not None for p in bayes.parameters())


def test_draws_of_another_network_are_refused() -> None:
    bayes, (x, _) = network(), data()
    other = dubito.bayesianize(nn.Linear(4, 3), dubito.MeanField())
    with pytest.raises(ValueError, match=r"made for another network.*draw\(S\)"):
        bayes.outputs(x, draws=other.draw(2))


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "3"])
def test_bad_numbers_of_draws(samples: Any) -> None:
    bayes, (x, _) = network(), data()
    for call in (bayes.draw, lambda s: bayes.outputs(x, samples=s), lambda s: bayes.predict(x, samples=s)):
        with pytest.raises(ValueError, match=r"samples=.* must be a whole number of at least 1"):
            call(samples)


def test_manual_seed_is_honoured_and_a_generator_leaves_the_global_one_alone() -> None:
    bayes, (x, _) = network(), data()
    results = []
    for s in (1, 1, 2):
        torch.manual_seed(s)
        results.append(bayes.predict(x, samples=3).probs)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    state = torch.get_rng_state()
    bayes.predict(x, samples=3, generator=seed())
    bayes.draw(3, seed())
    bayes.sample(seed())
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------ outputs


def test_outputs_want_exactly_one_source_of_draws() -> None:
    bayes, (x, _) = network(), data()
    for options in ({}, {"samples": 2, "draws": bayes.draw(2)}):
        with pytest.raises(ValueError, match=r"exactly one of samples=S .* and draws=bayes\.draw\(S\)"):
            bayes.outputs(x, **options)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_bad_chunk_sizes(chunk_size: int) -> None:
    bayes, (x, _) = network(), data()
    with pytest.raises(ValueError, match=r"chunk_size=.* must be at least 1"):
        bayes.predict(x, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=r"chunk_size=.* must be at least 1"):
        bayes.outputs(x, samples=2, chunk_size=chunk_size)


def test_outputs_in_training_mode_update_batch_statistics_and_drop_units() -> None:
    bayes, (x, _) = network(), data()
    bayes.outputs(x, samples=3)
    assert int(bayes.module[1].num_batches_tracked) == 3
    bayes.module.eval()
    bayes.outputs(x, samples=3)
    assert int(bayes.module[1].num_batches_tracked) == 3


def test_what_precedes_the_first_random_weight_is_computed_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    bayes = dubito.bayesianize(net, {"2": dubito.MeanField()})
    seen = []
    for layer in net:
        layer.register_forward_hook(
            lambda m, a, output: seen.append(torch._C._functorch.is_batchedtensor(output))
        )
    bayes.outputs(data()[0], samples=5)
    assert seen == [False, False, True]


def test_a_likelihoods_and_a_draws_gradient_is_the_mean_over_draws() -> None:
    bayes, (x, y) = network(), data()
    bayes.module.eval()
    draws = bayes.draw(3, seed())
    bayes.nll(bayes.outputs(x, draws=draws), y).backward()
    together = [p.grad.clone() for p in bayes.parameters()]
    bayes.zero_grad()
    for s in range(3):
        (bayes.nll(bayes.outputs(x, draws=draws[s]), y) / 3).backward()
    for p, gradient in zip(bayes.parameters(), together, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ predict


def test_t09_predict_averages_probabilities() -> None:
    bayes, (x, _) = network(), data()
    predictive = bayes.predict(x, samples=7, generator=seed())
    bayes.module.eval()
    logits = bayes.outputs(x, draws=bayes.draw(7, seed())).detach()
    torch.testing.assert_close(predictive.probs, logits.softmax(-1).mean(0))
    assert not torch.allclose(predictive.probs, logits.mean(0).softmax(-1), atol=1e-4)
    assert bayes.predict(x, samples=1).mutual_information.isfinite().all()


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 7))
def test_streams_and_chunks_give_what_one_shot_gives(samples: int, batch: int, chunk: int) -> None:
    bayes, (x, y) = network(), data()
    whole = bayes.predict(x, samples=samples, generator=seed())
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    for other in (
        bayes.predict(x, samples=samples, chunk_size=chunk, generator=seed()),
        bayes.predict(loader, samples=samples, generator=seed()),
        bayes.predict(loader, samples=samples, chunk_size=chunk, generator=seed()),
        bayes.predict(loader, draws=bayes.draw(samples, seed()), chunk_size=chunk),
        bayes.predict(x, draws=bayes.draw(samples, seed())),
    ):
        torch.testing.assert_close(other.probs, whole.probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.mutual_information, whole.mutual_information, rtol=1e-3, atol=1e-5)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        output: Tensor = self.layer(features) * scale
        return output


def test_all_forms_of_input() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(Named(), dubito.MeanField(), likelihood=dubito.Categorical())
    x, y = data(6)
    expected = bayes.predict(x, samples=3, generator=seed()).probs

    def batches() -> Iterator[Any]:
        yield from zip(x.split(4), y.split(4), strict=True)

    forms: dict[str, Any] = {
        "tuple": (x,),
        "tuple of two": (x, torch.ones(6, 1)),
        "mapping": {"features": x, "scale": 1.0},
        "list of tensors": [x[:4], x[4:]],
        "list of pairs": list(batches()),
        "generator of pairs": batches(),
        "list of mappings with labels": [{"features": a, "labels": b} for a, b in batches()],
        "list of mappings with a label": [{"features": a, "label": b} for a, b in batches()],
        "pairs whose input is a tuple": [((a, 1.0), b) for a, b in batches()],
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
    }
    for name, form in forms.items():
        predictive = bayes.predict(form, samples=3, generator=seed())
        torch.testing.assert_close(predictive.probs, expected, msg=name)
    assert as_arguments((1, 2)) == ((1, 2), {})
    assert as_arguments({"a": 1}) == ((), {"a": 1})
    assert as_arguments(3) == ((3,), {})


def test_draws_are_kept_for_one_batch_and_not_for_a_stream_unless_asked() -> None:
    bayes, (x, _) = network(), data()
    assert bayes.predict(x, samples=3).draws is not None
    assert bayes.predict(x, samples=3, keep_draws=False).draws is None
    assert bayes.predict([x[:5], x[5:]], samples=3).draws is None
    kept = bayes.predict([x[:5], x[5:]], samples=3, keep_draws=True).draws
    assert kept is not None
    assert kept.shape == (3, 10, 3)


def test_predict_uses_evaluation_behaviour_and_puts_every_flag_back() -> None:
    bayes, (x, _) = network(), data()
    bayes.module[2].eval()
    flags = [m.training for m in bayes.modules()]
    before = bayes.module[1].running_mean.clone()
    first = bayes.predict(x, samples=2, generator=seed()).probs
    assert torch.equal(first, bayes.predict(x, samples=2, generator=seed()).probs), "no dropout"
    assert torch.equal(bayes.module[1].running_mean, before)
    assert [m.training for m in bayes.modules()] == flags
    assert not first.requires_grad
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        bayes.predict(torch.zeros(2, 5), samples=2)
    assert [m.training for m in bayes.modules()] == flags

    def broken() -> Iterator[Tensor]:
        yield x
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        bayes.predict(broken(), samples=2)
    assert [m.training for m in bayes.modules()] == flags
    with evaluating(bayes):
        assert not any(m.training for m in bayes.modules())
    assert [m.training for m in bayes.modules()] == flags


def test_bad_inputs_of_predict() -> None:
    bayes, (x, _) = network(), data()
    with pytest.raises(ValueError, match="empty loader"):
        bayes.predict([], samples=2)
    with pytest.raises(TypeError, match=r"x must be a tensor, a tuple or mapping.*not int"):
        bayes.predict(3, samples=2)
    with pytest.raises(TypeError, match=r"not ndarray: pass torch\.as_tensor"):
        bayes.predict(x.numpy(), samples=2)
    for call in (bayes.predict, bayes.outputs):
        with pytest.raises(TypeError, match=r"draws must come from bayes\.draw\(S\), got int"):
            call(x, draws=5)
    for seeded in (lambda: bayes.predict(x, generator=0), lambda: bayes.draw(2, 0), lambda: bayes.sample(0)):
        with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got int: a seed"):
            seeded()
    with pytest.raises(ValueError, match=r"estimator='antithetic' is not offered.*flipout, local, weights"):
        bayes.predict(x, estimator="antithetic")
    with pytest.raises(RuntimeError, match=r"dtype|Double|double"):
        bayes.predict(x.double(), samples=2)
    with pytest.raises(ValueError, match=r"no likelihood: .*likelihood=dubito\.Categorical\(\)"):
        network(likelihood=None).predict(x)


def test_a_wrong_input_does_not_put_the_network_on_the_slow_path() -> None:
    bayes = network()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        bayes.predict(torch.zeros(2, 5), samples=2)
    assert not bayes._needs_loop


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_t16_estimators_predict_the_same_marginals_but_no_joint(estimator: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    bayes = dubito.bayesianize(net, dubito.MeanField(scale=0.5), likelihood=dubito.Categorical())
    x, y = data(4)
    torch.manual_seed(1)
    weights = bayes.predict(x, samples=6000)
    other = bayes.predict(x, samples=6000, estimator=estimator)
    assert weights.draws is not None
    assert other.draws is not None
    error = ((weights.draws.var(0) + other.draws.var(0)) / 6000).sqrt()
    assert ((weights.probs - other.probs) / error).abs().max() < 4.5
    assert weights.log_prob(y, joint=True).isfinite().all()
    with pytest.raises(Exception, match=r"joint|consistent|function"):
        other.log_prob(y, joint=True)


def test_regression_predicts_mean_and_both_variances() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(4, 1), dubito.MeanField(), likelihood=dubito.Gaussian(noise=0.3))
    x, _ = data()
    predictive = bayes.predict(x, samples=40_000, generator=seed(), chunk_size=10_000)
    variance = sum(p.variance()[p.slots[0].name].reshape(1, -1) @ s.T for p, s in zip(
        bayes.posteriors(), (x.square(), torch.ones(10, 1)), strict=True))  # fmt: skip
    torch.testing.assert_close(predictive.mean, bayes.module(x), atol=0.01, rtol=0.01)
    torch.testing.assert_close(predictive.epistemic.reshape(-1), variance.reshape(-1), rtol=0.05, atol=1e-3)
    assert torch.allclose(predictive.aleatoric, torch.tensor(0.09), atol=1e-6)
    shifted = bayes.predict(x, samples=8, generator=seed())
    bayes.set_target_scale(torch.tensor(5.0), torch.tensor(2.0))
    undone = bayes.predict(x, samples=8, generator=seed())
    torch.testing.assert_close(undone.mean, 5 + 2 * shifted.mean)
    torch.testing.assert_close(undone.variance, 4 * shifted.variance)


def test_bernoulli_probabilities() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Linear(4, 1), dubito.MeanField(), likelihood=dubito.Bernoulli())
    x, _ = data()
    logits = bayes.outputs(x, draws=bayes.draw(5, seed())).detach()
    predictive = bayes.predict(x, draws=bayes.draw(5, seed()))
    torch.testing.assert_close(predictive.probs.reshape(-1), logits.sigmoid().mean(0).reshape(-1))
    assert math.isfinite(float(predictive.entropy.sum()))


def test_attention_has_a_batching_rule_and_switches_are_put_back() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            q = self.project(x)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    torch.manual_seed(0)
    bayes = dubito.bayesianize(Attention(), dubito.MeanField())
    x, draws = torch.randn(2, 5, 6), bayes.draw(3)
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        together = bayes.outputs(x, draws=draws)
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before
    assert not bayes._needs_loop
    bayes._needs_loop = True
    torch.testing.assert_close(together, bayes.outputs(x, draws=draws).detach(), rtol=1e-5, atol=1e-6)


class Keeping(nn.Module):
    """Keeps what it computes: an activation, a statistic assigned anew, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last: Tensor | None = None
        self.seen: list[Tensor] = []
        self.register_buffer("level", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.seen.append(self.last)
        self.level = 0.9 * self.level + 0.1 * self.last.mean(0)
        return self.last - self.level


def test_what_a_network_keeps_of_a_call_is_no_batched_tensor() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(Keeping(), dubito.MeanField(scale=0.5), likelihood=dubito.Categorical())
    x, draws = data()[0], bayes.draw(3)
    outputs = bayes.outputs(x, draws=draws)
    assert len(bayes.module.seen) == 3
    level = torch.zeros(3)
    with torch.no_grad():
        for output, seen in zip(outputs, bayes.module.seen, strict=True):
            level = 0.9 * level + 0.1 * seen.mean(0)
            assert torch.allclose(output, seen - level)
    assert torch.allclose(bayes.module.level, level)
    bayes.module.last, bayes.module.level = None, level.detach()
    bayes.module.seen.clear()
    bayes.predict(x, samples=2)
    bayes.sample()
    copy.deepcopy(bayes)
    old = nn.utils.weight_norm(nn.Linear(4, 3))
    bayes = dubito.bayesianize(old, dubito.MeanField(), likelihood=dubito.Categorical())
    bayes.predict(x, samples=2)
    bayes.merge()


def test_threads_that_predict_leave_the_flags_as_they_were() -> None:
    bayes, (x, _) = network(), data(8)
    for _ in range(5):
        threads = [
            threading.Thread(target=lambda: bayes.predict(list(x.split(1)), samples=2)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(m.training for m in bayes.modules())


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_outputs_are_drawn_from_the_generator_that_is_given(estimator: Any) -> None:
    torch.manual_seed(0)
    family = dubito.MeanField(scale=0.5, estimator=estimator)
    bayes = dubito.bayesianize(nn.Linear(4, 3), family, likelihood=dubito.Categorical())
    x = data()[0]
    before = torch.get_rng_state()
    one = [bayes.outputs(x, samples=3, generator=seed()) for _ in range(2)]
    two = [bayes.predict(x, samples=3, generator=seed(), estimator=estimator).probs for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one[0], one[1])
    assert torch.equal(two[0], two[1])
    assert not torch.equal(one[0], bayes.outputs(x, samples=3, generator=seed(4)))
    assert not torch.equal(one[0], bayes.outputs(x, samples=3))
