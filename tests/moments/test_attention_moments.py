"""Attention and softmax: PyTorch's own at no noise, Monte Carlo, the exact first order, masks."""

import math

import pytest
import torch
import torch.nn.functional as F
from gaussian_expectation import monte_carlo
from torch import Tensor

from dubito.moments.attention_moments import (
    attend_moments,
    attention_moments,
    attention_scores,
    log_softmax_moments,
    softmax_moments,
)

Pair = tuple[Tensor, Tensor]


def gaussian(*shape: int, sd: float = 0.3, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, torch.full_like(mean, sd**2)


def inputs(sd: float, values_sd: float = 0.3) -> tuple[Pair, Pair, Pair]:
    return (
        gaussian(2, 3, 10, 16, sd=sd),
        gaussian(2, 3, 10, 16, sd=sd, seed=1),
        gaussian(2, 3, 10, 8, sd=values_sd, seed=2),
    )


@pytest.mark.parametrize("sd", [0.2, 0.5])
def test_rules_against_monte_carlo(sd: float) -> None:
    pairs = inputs(sd)
    mean, variance = monte_carlo(F.scaled_dot_product_attention, *pairs, draws=2500)
    out = {name: attention_moments(*pairs, rule=name) for name in ("mean", "delta")}  # type: ignore[arg-type]
    plain = attention_moments(*pairs, rule="delta", probit=False)
    ratios = {name: ((o[1] / variance).mean().item()) for name, o in out.items()}  # type: ignore[operator]
    assert 0.93 < ratios["delta"] < 1.05
    assert ratios["mean"] < 0.7
    assert (out["delta"][1] / variance).log().square().mean().sqrt() < 0.16  # type: ignore[operator]
    error, unscaled = ((o[0] - mean).square().mean().sqrt() for o in (out["delta"], plain))
    assert error < 0.8 * unscaled


def test_delta_rule_is_the_jacobian_for_independent_scores() -> None:
    scores, values = gaussian(3, 5, sd=0.4), gaussian(5, 2, seed=1)
    out = attend_moments(scores, values, rule="delta", probit=False)
    by_scores = torch.func.jacrev(lambda s: torch.softmax(s, -1) @ values[0])(scores[0])
    by_values = torch.func.jacrev(lambda v: torch.softmax(scores[0], -1) @ v)(values[0])
    expected = torch.einsum("ieab,ab->ie", by_scores.square(), scores[1])
    expected = expected + torch.einsum("ieab,ab->ie", by_values.square(), values[1])
    torch.testing.assert_close(out[0], torch.softmax(scores[0], -1) @ values[0])
    torch.testing.assert_close(out[1], expected)


def test_a_common_offset_of_the_values_does_not_cancel_in_single_precision() -> None:
    scores, values = gaussian(4, 6), gaussian(6, 3, seed=1)
    exact = attend_moments(scores, (values[0], None))[1]
    moved = attend_moments((scores[0].float(), scores[1].float()), ((values[0] + 1000.0).float(), None))[1]
    assert exact is not None
    assert moved is not None
    torch.testing.assert_close(moved.double(), exact, rtol=2e-3, atol=1e-6)


def test_mean_rule_is_the_published_one() -> None:
    query, key, value = inputs(0.4)
    weights = torch.softmax(query[0] @ key[0].mT / 4.0, -1)
    out = attention_moments(query, key, value, rule="mean")
    torch.testing.assert_close(out[0], weights @ value[0])
    torch.testing.assert_close(out[1], weights.square() @ value[1])
    common = attention_moments(query, key, value, rule="mean", rho=1.0)
    torch.testing.assert_close(common[1], (weights @ value[1].sqrt()).square())
    half = attention_moments(query, key, value, rule="mean", rho=torch.tensor(0.5, dtype=torch.float64))
    assert out[1] is not None
    assert common[1] is not None
    torch.testing.assert_close(half[1], 0.5 * (out[1] + common[1]))


MASKS = {
    "none": {},
    "boolean": {"mask": torch.rand(10, 10, generator=torch.Generator().manual_seed(3)) > 0.3},
    "float": {
        "mask": torch.randn(2, 1, 10, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    },
    "padding": {"mask": (torch.arange(10) < 7).expand(2, 1, 1, 10)},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rule", ["mean", "delta"])
def test_masks_and_scale_are_pytorchs(name: str, rule: str) -> None:
    query, key, value = inputs(0.3)
    options = MASKS[name]
    plain = {("attn_mask" if k == "mask" else k): v for k, v in options.items()}
    expected = F.scaled_dot_product_attention(query[0], key[0], value[0], **plain)  # type: ignore[arg-type]
    nothing = tuple((mean, torch.zeros_like(variance)) for mean, variance in (query, key, value))
    out = attention_moments(*nothing, **options, rule=rule)  # type: ignore[arg-type]
    torch.testing.assert_close(out[0], expected)
    assert out[1] is not None
    assert (out[1] == 0).all()
    noisy = attention_moments(query, key, value, **options, rule=rule)  # type: ignore[arg-type]
    assert noisy[1] is not None
    assert torch.isfinite(noisy[1]).all()
    if name == "causal" and rule == "delta":
        reference = monte_carlo(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            query,
            key,
            value,
            draws=2500,
        )
        assert 0.93 < (noisy[1] / reference[1]).mean() < 1.07


def test_what_is_masked_has_no_say() -> None:
    query, key, value = inputs(0.3)
    mask = torch.arange(10) < 6
    out = attention_moments(query, key, value, mask=mask)
    cut = [(mean[:, :, :6], variance[:, :, :6]) for mean, variance in (key, value)]
    torch.testing.assert_close(out, attention_moments(query, *cut))


def test_a_query_that_may_look_nowhere_gives_zeros() -> None:
    query, key, value = inputs(0.3)
    mask = torch.ones(10, 10, dtype=torch.bool)
    mask[4] = False
    for tensor in (*query, *key, *value):
        tensor.requires_grad_()
    out = attention_moments(query, key, value, mask=mask)
    assert out[1] is not None
    assert (out[0][:, :, 4] == 0).all()
    assert (out[1][:, :, 4] == 0).all()
    (out[0].sum() + out[1].sum()).backward()  # type: ignore[no-untyped-call]
    assert all(torch.isfinite(t.grad).all() for t in (*query, *key, *value) if t.grad is not None)


def test_grouped_queries_repeat_keys_and_values() -> None:
    query, key, value = gaussian(2, 6, 5, 4), gaussian(2, 2, 5, 4, seed=1), gaussian(2, 2, 5, 4, seed=2)
    out = attention_moments(query, key, value, enable_gqa=True)
    repeated = [tuple(t.repeat_interleave(3, 1) for t in pair) for pair in (key, value)]
    torch.testing.assert_close(out, attention_moments(query, *repeated))  # type: ignore[arg-type]
    certain = attention_moments((query[0], None), (key[0], None), (value[0], None), enable_gqa=True)
    torch.testing.assert_close(
        certain[0], F.scaled_dot_product_attention(query[0], key[0], value[0], enable_gqa=True)
    )
    assert certain[1] is None


def test_only_values_are_random() -> None:
    query, key, value = inputs(0.3)
    out = attention_moments((query[0], None), (key[0], None), value, rule="delta")
    torch.testing.assert_close(out, attention_moments(query, key, value, rule="mean"))
    assert attention_moments(query, key, (value[0], None), rule="mean")[1] is None
    assert attention_moments(query, key, (value[0], None), rule="delta")[1] is not None


def test_scores_of_composed_attention_make_the_same() -> None:
    query, key, value = inputs(0.3)
    scores = attention_scores(query, key, scale=0.25)
    torch.testing.assert_close(attend_moments(scores, value), attention_moments(query, key, value))


@pytest.mark.parametrize(("sd", "low", "high"), [(0.1, 0.93, 1.07), (0.3, 0.88, 1.12)])
def test_softmax_against_monte_carlo(sd: float, low: float, high: float) -> None:
    x = gaussian(10, 10, sd=sd)
    mean, variance = monte_carlo(lambda a: torch.softmax(a, -1), x, draws=6000)
    out = softmax_moments(*x)
    assert (out[0] - mean).abs().max() < 0.004
    ratio = out[1] / variance
    assert low < ratio.min() < ratio.max() < high
    torch.testing.assert_close(out[0].sum(-1), torch.ones(10, dtype=torch.float64))


def test_softmax_is_the_jacobian_at_small_noise() -> None:
    mean, variance = gaussian(6, sd=1e-3)
    for rule, plain in ((softmax_moments, torch.softmax), (log_softmax_moments, torch.log_softmax)):
        jacobian = torch.func.jacrev(lambda a: plain(a, -1))(mean)  # noqa: B023
        out = rule(mean, variance)
        torch.testing.assert_close(out[0], plain(mean, -1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[1], jacobian.square() @ variance, rtol=1e-5, atol=0.0)
    single = softmax_moments(mean.float(), variance.float())[1]
    torch.testing.assert_close(single.double(), softmax_moments(mean, variance)[1], rtol=1e-5, atol=0.0)


def test_softmax_saturated_masked_and_along_another_dimension() -> None:
    mean, variance = torch.tensor([[0.0, 90.0, -math.inf], [1.0, 1.0, 1.0]]), torch.ones(2, 3)
    out = softmax_moments(mean, variance)
    assert torch.isfinite(out[0]).all()
    assert (out[1] >= 0).all()
    assert out[0][0, 2] == out[1][0, 2] == 0.0
    turned = softmax_moments(mean.T, variance.T, dim=0)
    torch.testing.assert_close(turned[1].T, out[1])


def test_gradients() -> None:
    query, key, value = (gaussian(3, 4, seed=s) for s in range(3))
    tensors = [t.requires_grad_() for t in (*query, *key, *value)]

    def run(*t: Tensor) -> tuple[Tensor, Tensor | None]:
        return attention_moments((t[0], t[1]), (t[2], t[3]), (t[4], t[5]), is_causal=True, rho=0.3)

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradcheck(softmax_moments, tensors[:2])


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="rule='exact'"):
        attention_moments(*inputs(0.3), rule="exact")  # type: ignore[arg-type]
