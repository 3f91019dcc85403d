"""Rules of attention: fused, and written out as a softmax and a product.

A softmax remembers its scores; a product of its result with values is then one attention (the two operators one after
the other would weigh the scores' noise by V² in place of (V - out)²). What lies between them in models (dropout, casts,
reshapes to and from heads) keeps the memory where it leaves the last dimension alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments.attention_moments import (
    attend_moments,
    attention_moments,
    log_softmax_moments,
    softmax_moments,
)
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import mean_of, pair
from dubito.moments.registry import register


@dataclass
class Softmax:
    """`x = softmax(scores)` over the last dimension."""

    scores: Moments


@register(
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    exactness="approximate",
    note='first order in the scores (rule "delta"), or probabilities at the mean ("mean")',
    site="attention",
)
def _attention(
    context: Context,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rho: Any = None,
) -> Any:
    if isinstance(attn_mask, Moments):
        return _biased_attention(context, query, key, value, attn_mask, is_causal, scale, enable_gqa, rho)
    rule = context.rules.attention
    result = attention_moments(
        pair(query),
        pair(key),
        pair(value),
        attn_mask,
        is_causal,
        scale,
        enable_gqa=enable_gqa,
        rule=rule,
        rho=0.0 if rho is None else rho,
    )
    return random(result)


def _biased_attention(
    context: Context,
    query: Any,
    key: Any,
    value: Any,
    bias: Moments,
    causal: bool,
    scale: Any,
    gqa: bool,
    rho: Any,
) -> Any:
    """Attention with a random bias of the scores (relative positions)."""
    if gqa:
        raise context.no_rule("scaled_dot_product_attention", " with a random mask and enable_gqa=True")
    from dubito.moments.attention_moments import attention_scores

    mean, variance = attention_scores(pair(query), pair(key), mask=bias.mean, is_causal=causal, scale=scale)
    variance = bias.variance if variance is None else variance + bias.variance
    correlation = 0.0 if rho is None else rho
    return random(
        attend_moments((mean, variance), pair(value), rule=context.rules.attention, rho=correlation)
    )


def random(result: tuple[Tensor, Tensor | None]) -> Moments:
    """`Moments`, of variance zero where a rule looks at nothing random (it had random inputs all the same)."""
    mean, variance = result
    return Moments(mean, torch.zeros_like(mean) if variance is None else variance)


@register(
    "softmax",
    "_softmax",
    "special_softmax",
    F.softmax,
    exactness="approximate",
    note="first order; with the product that follows it is one attention",
)
def _softmax(
    context: Context, input: Moments, dim: Any = None, *args: Any, dtype: Any = None, **_: Any
) -> Moments:
    if dtype is None and args and isinstance(args[-1], torch.dtype):
        dtype = args[-1]
    if dim is None:
        dim = 0 if input.ndim in (0, 1, 3) else 1
    mean, variance = input.mean, input.variance
    if dtype is not None:
        mean, variance = mean.to(dtype), variance.to(dtype)
    scores = Moments(mean, variance)
    result = Moments(*softmax_moments(mean, variance, dim))
    if context.rules.attention == "mean":
        result = (
            Moments(result.mean, torch.zeros_like(result.mean))
            if dim % input.ndim == input.ndim - 1
            else result
        )
    if dim % input.ndim == input.ndim - 1:
        result.origin = Softmax(scores)
    return result


@register("log_softmax", "_log_softmax", F.log_softmax, exactness="approximate", note="first order")
def _log_softmax(context: Context, input: Moments, dim: Any = None, *_: Any, **__: Any) -> Moments:
    dim = dim if dim is not None else (0 if input.ndim in (0, 1, 3) else 1)
    return Moments(*log_softmax_moments(input.mean, input.variance, dim))


@register(
    "logsumexp", "special_logsumexp", exactness="approximate", note="second-order mean, first-order variance"
)
def _logsumexp(context: Context, input: Moments, dim: Any, keepdim: bool = False) -> Moments:
    dims = [dim] if isinstance(dim, int) else list(dim)
    total = torch.logsumexp(input.mean, dims, keepdim=True)
    p = (input.mean - total).exp()
    mean = total + 0.5 * (p * (1.0 - p) * input.variance).sum(dims, keepdim=True)
    variance = (p.square() * input.variance).sum(dims, keepdim=True)
    if keepdim:
        return Moments(mean, variance)
    return Moments(*(t.reshape(torch.logsumexp(input.mean, dims).shape) for t in (mean, variance)))


def attended(context: Context, weights: Any, values: Any, equation: str | None = None) -> Any:
    """The product of attention probabilities with values as one attention; None where it is no such product."""
    if not is_attention(weights, values, equation):
        return None
    site, rho = context.correlation("attention")
    scores = weights.origin.scores
    result = attend_moments(
        pair(scores), pair(values), rule=context.rules.attention, rho=0.0 if rho is None else rho
    )
    out = random(result)
    context.observe(site, out)
    return out


def is_attention(weights: Any, values: Any, equation: str | None = None) -> bool:
    """Whether a product (or a two-operand einsum) is one of attention probabilities with values."""
    if not isinstance(weights, Moments) or not isinstance(weights.origin, Softmax):
        return False
    if mean_of(values).ndim != weights.ndim or mean_of(values).shape[-2] != weights.shape[-1]:
        return False
    return equation is None or _is_product(equation)


def _is_product(equation: str) -> bool:
    """Whether an equation is `…ij,…jk->…ik`."""
    left, _, right = equation.replace(" ", "").replace("...", "").partition("->")
    a, _, b = left.partition(",")
    return len(a) >= 2 and len(b) >= 2 and a[:-2] == b[:-2] and a[-1] == b[-2] and right == a[:-1] + b[-1]
