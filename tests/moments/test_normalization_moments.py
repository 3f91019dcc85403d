"""Normalisation layers: Monte Carlo, the exact Jacobian by autograd, and the limits of each rule."""

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import monte_carlo
from torch import Tensor

from dubito.moments.normalization_moments import (
    NORM_RULES,
    NormRule,
    batch_norm_moments,
    group_norm_moments,
    instance_norm_moments,
    l2_normalize_moments,
    layer_norm_moments,
    rms_norm_moments,
)

Pair = tuple[Tensor, Tensor]


def gaussian(*shape: int, sd: float = 0.3, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = sd * torch.exp(0.5 * torch.randn(shape, generator=generator, dtype=torch.float64))
    return mean, spread.square()


def with_outlier(channel: int, mean: float, sd: float) -> Pair:
    x, variance = gaussian(8, 64)
    x[:, channel], variance[:, channel] = mean, sd**2
    return x, variance


def log_error(out: Tensor, expected: Tensor) -> float:
    return (out.log() - expected.log()).square().mean().sqrt().item()


@pytest.mark.parametrize(("mean", "sd"), [(6.0, 1.8), (10.0, 1.0), (12.0, 1.8)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_jacobian_rule_survives_an_outlier_channel(mean: float, sd: float, kind: str) -> None:
    x = with_outlier(3, mean, sd)
    plain = F.layer_norm if kind == "layer" else F.rms_norm
    rule = layer_norm_moments if kind == "layer" else rms_norm_moments
    expected = monte_carlo(lambda a: plain(a, (64,)), x, draws=6000)
    errors = {name: log_error(rule(x, (64,), rule=name)[1], expected[1]) for name in NORM_RULES}
    assert errors["jacobian"] <= 0.06
    assert errors["expected-scale"] > 0.15
    assert errors["mean-scale"] > 0.15


def test_rules_on_a_wide_layer_of_equal_channels() -> None:
    x = gaussian(4, 768)
    mean, variance = monte_carlo(lambda a: F.layer_norm(a, (768,)), x, draws=2000)
    out = {name: layer_norm_moments(x, (768,), rule=name) for name in NORM_RULES}
    assert log_error(out["jacobian"][1], variance) < 0.04
    assert log_error(out["expected-scale"][1], variance) < 0.04
    assert log_error(out["mean-scale"][1], variance) > 0.1
    bias = {name: (o[0] - mean).square().mean().sqrt().item() for name, o in out.items()}
    assert bias["expected-scale"] == bias["jacobian"] < 0.012
    assert bias["mean-scale"] > 0.05


@pytest.mark.parametrize("width", [8, 64])
def test_expected_scale_is_the_expectation(width: int) -> None:
    x = gaussian(3, width, sd=0.8)
    z = layer_norm_moments(x, (width,), eps=0.0, rule="expected-scale")[0]
    scale = ((x[0] - x[0].mean(-1, keepdim=True)) / z)[:, 0].square()
    expected, spread = monte_carlo(lambda a: a.var(-1, correction=0), x, draws=20000)
    assert ((scale - expected).abs() < 5 * (spread / 20000).sqrt()).all()


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_jacobian_rule_is_the_jacobian_at_small_noise(kind: str) -> None:
    mean, variance = gaussian(12)
    variance = 1e-8 * variance
    plain = F.layer_norm if kind == "layer" else F.rms_norm
    rule = layer_norm_moments if kind == "layer" else rms_norm_moments
    jacobian = torch.func.jacrev(lambda a: plain(a, (12,), eps=1e-3))(mean)
    out = rule((mean, variance), (12,), eps=1e-3, rule="jacobian")
    torch.testing.assert_close(out[0], plain(mean, (12,), eps=1e-3), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out[1], jacobian.square() @ variance, rtol=1e-6, atol=1e-16)


def test_mean_scale_is_the_layer_at_the_mean() -> None:
    x, gamma, beta = gaussian(5, 6), gaussian(6, seed=1), gaussian(6, seed=2)
    out = layer_norm_moments(x, (6,), (gamma[0], None), (beta[0], None), rule="mean-scale")
    torch.testing.assert_close(out[0], F.layer_norm(x[0], (6,), gamma[0], beta[0]))
    scale = x[0].var(-1, correction=0, keepdim=True) + 1e-5
    torch.testing.assert_close(out[1], x[1] * gamma[0].square() / scale)


@pytest.mark.parametrize("rule", NORM_RULES)
def test_random_affine_weights_against_monte_carlo(rule: NormRule) -> None:
    x, gamma, beta = gaussian(2, 400, sd=0.2), gaussian(400, seed=1), gaussian(400, seed=2)
    x = (x[0], torch.full_like(x[1], 0.01))
    expected = monte_carlo(lambda a, g, b: F.layer_norm(a, (400,), g, b), x, gamma, beta, draws=3000)
    out = layer_norm_moments(x, (400,), gamma, beta, rule=rule)
    assert log_error(out[1], expected[1]) < 0.05
    assert (out[0] - expected[0]).abs().max() < 6 * (expected[1].max() / 3000).sqrt()


def test_normalising_several_dimensions() -> None:
    x, gamma = gaussian(2, 3, 4), gaussian(3, 4, seed=1)
    out = layer_norm_moments(x, (3, 4), gamma)
    flat = layer_norm_moments(
        (x[0].flatten(1), x[1].flatten(1)), (12,), (gamma[0].flatten(), gamma[1].flatten())
    )
    torch.testing.assert_close(out[0].flatten(1), flat[0])
    torch.testing.assert_close(out[1].flatten(1), flat[1])


@pytest.mark.parametrize("rule", NORM_RULES)
def test_groups_are_layer_norms(rule: NormRule) -> None:
    x, gamma, beta = gaussian(2, 6, 5, 5), gaussian(6, seed=1), gaussian(6, seed=2)
    out = group_norm_moments(x, 3, gamma, beta, rule=rule)
    for g in range(3):
        part = slice(2 * g, 2 * g + 2)
        affine = tuple(
            (pair[0][part, None, None].expand(2, 5, 5), pair[1][part, None, None].expand(2, 5, 5))
            for pair in (gamma, beta)
        )
        expected = layer_norm_moments((x[0][:, part], x[1][:, part]), (2, 5, 5), *affine, rule=rule)
        torch.testing.assert_close(out[0][:, part], expected[0])
        torch.testing.assert_close(out[1][:, part], expected[1])
    certain = group_norm_moments(
        (x[0], torch.zeros_like(x[1])), 3, (gamma[0], None), (beta[0], None), rule=rule
    )
    torch.testing.assert_close(certain[0], F.group_norm(x[0], 3, gamma[0], beta[0]))
    instance = instance_norm_moments((x[0], torch.zeros_like(x[1])), rule=rule)
    torch.testing.assert_close(instance[0], F.instance_norm(x[0]))
    assert (instance[1] == 0).all()


def test_batch_norm_by_running_statistics() -> None:
    x, gamma, beta = gaussian(2, 3, 4, 4), gaussian(3, seed=1), gaussian(3, seed=2)
    running = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    out = batch_norm_moments(x, *running, gamma, beta)
    expected = monte_carlo(
        lambda a, g, b: (a - running[0].view(-1, 1, 1)) * (g / (running[1] + 1e-5).sqrt()).view(-1, 1, 1)
        + b.view(-1, 1, 1),
        x, gamma, beta, draws=8000,
    )  # fmt: skip
    assert log_error(out[1], expected[1]) < 0.03
    assert (out[0] - expected[0]).abs().max() < 6 * (expected[1].max() / 8000).sqrt()
    plain = batch_norm_moments((x[0], None), *running, (gamma[0], None), (beta[0], None))
    torch.testing.assert_close(plain[0], F.batch_norm(x[0], *running, gamma[0], beta[0]))
    assert plain[1] is None
    noisy = batch_norm_moments((x[0], None), *running, gamma, beta)
    same = batch_norm_moments((x[0], torch.zeros_like(x[1])), *running, gamma, beta)
    torch.testing.assert_close(noisy, same)
    assert batch_norm_moments((x[0][:, :, 0, 0], x[1][:, :, 0, 0]), *running)[0].shape == (2, 3)


def test_l2_normalisation() -> None:
    x = gaussian(4, 64, 3, sd=0.1)
    out = l2_normalize_moments(x, dim=1)
    expected = monte_carlo(lambda a: F.normalize(a, dim=1), x, draws=4000)
    assert log_error(out[1], expected[1]) < 0.05
    certain = l2_normalize_moments((x[0], torch.zeros_like(x[1])), dim=1)
    torch.testing.assert_close(certain[0], F.normalize(x[0], dim=1))


@pytest.mark.parametrize("rule", NORM_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_channel_with_all_the_noise_and_none_at_all(rule: NormRule, dtype: torch.dtype) -> None:
    mean, variance = torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    mean[0], variance[0] = 100.0, 1.0
    x = mean.requires_grad_(), variance.requires_grad_()
    out = layer_norm_moments(x, (64,), rule=rule)
    assert (out[1] >= 0).all()
    sum(o.sum() for o in out).backward()  # type: ignore[union-attr]
    assert mean.grad is not None
    assert variance.grad is not None
    assert torch.isfinite(mean.grad).all()
    assert torch.isfinite(variance.grad).all()
    constant = layer_norm_moments(
        (torch.ones(3, 8, dtype=dtype), torch.zeros(3, 8, dtype=dtype)), (8,), rule=rule
    )
    assert (constant[0] == 0).all()
    assert (constant[1] == 0).all()


@pytest.mark.parametrize("rule", NORM_RULES)
def test_gradients(rule: NormRule) -> None:
    tensors = [t.requires_grad_() for t in (*gaussian(3, 6), *gaussian(6, seed=1), *gaussian(6, seed=2))]

    def run(*t: Tensor) -> Pair:
        return layer_norm_moments((t[0], t[1]), (6,), (t[2], t[3]), (t[4], t[5]), rule=rule)

    assert torch.autograd.gradcheck(run, tensors)


def test_bad_arguments_are_named() -> None:
    x = gaussian(2, 6)
    with pytest.raises(ValueError, match="rule='exact'"):
        layer_norm_moments(x, (6,), rule="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"normalized_shape=\(5,\)"):
        layer_norm_moments(x, (5,))
    with pytest.raises(ValueError, match=r"normalized_shape=\(5,\)"):
        rms_norm_moments(x, (5,))
    with pytest.raises(ValueError, match="num_groups=4 must divide the number of channels, 6"):
        group_norm_moments(x, 4)
