"""Rules of normalisation layers, by the rule set's choice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments import normalization_moments as formulas
from dubito.moments.moments import Context, Moments
from dubito.moments.operands import full_precision, mean_of, optional_pair, pair
from dubito.moments.registry import register

NOTE = "expected scale, with the exact diagonal of the Jacobian unless the rule set says otherwise"


def _normalize(context: Context, formula: Any, x: Any, *args: Any, **kwargs: Any) -> Moments:
    x = x if isinstance(x, Moments) else Moments(x, torch.zeros_like(x))  # random weights only
    if torch.is_autocast_enabled(x.device.type):  # as autocast does for these operators
        x = Moments(x.mean.float(), x.variance.float())
    return full_precision(lambda m, v: formula((m, v), *args, rule=context.rules.normalization, **kwargs), x)


@register("layer_norm", F.layer_norm, exactness="approximate", note=NOTE, site="norm")
def _layer_norm(
    context: Context,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Moments:
    args = (normalized_shape, optional_pair(weight), optional_pair(bias), eps)
    return _normalize(context, formulas.layer_norm_moments, input, *args)


@register("rms_norm", F.rms_norm, exactness="approximate", note=NOTE, site="norm")
def _rms_norm(
    context: Context, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Moments:
    args = (normalized_shape, optional_pair(weight), eps)
    return _normalize(context, formulas.rms_norm_moments, input, *args)


@register("group_norm", F.group_norm, exactness="approximate", note=NOTE, site="norm")
def _group_norm(
    context: Context,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Moments:
    args = (num_groups, optional_pair(weight), optional_pair(bias), eps)
    return _normalize(context, formulas.group_norm_moments, input, *args)


@register(F.instance_norm, exactness="approximate", note=NOTE, site="norm")
def _instance_norm(
    context: Context,
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    if not use_input_stats:
        return _batch_norm(context, input, running_mean, running_var, weight, bias, eps=eps)
    return _normalize(
        context, formulas.instance_norm_moments, input, optional_pair(weight), optional_pair(bias), eps
    )


@register(torch.instance_norm, torch.ops.aten.instance_norm, exactness="approximate", note=NOTE, site="norm")
def _aten_instance_norm(
    context: Context,
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    stats: bool,
    m: float,
    eps: float,
    *_: Any,
) -> Moments:
    return _instance_norm(context, input, mean, var, weight, bias, stats, m, eps)


@register(F.batch_norm, site="norm", note="of evaluation: affine")
def _batch_norm(
    context: Context,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Moments:
    if training or running_mean is None or running_var is None:
        if running_mean is None and mean_of(input) is not None:
            raise context.no_rule(
                "batch_norm",
                " by the batch's own statistics (track_running_stats=False): one example's moments would depend on the "
                "others'",
            )
        raise context.no_rule("batch_norm(training=True)", ": propagation runs with evaluation behaviour")
    mean, variance = formulas.batch_norm_moments(
        pair(input),
        mean_of(running_mean),
        mean_of(running_var),
        optional_pair(weight),
        optional_pair(bias),
        eps,
    )
    assert variance is not None
    return Moments(mean, variance)


@register(torch.batch_norm, torch.ops.aten.batch_norm, site="norm", note="of evaluation: affine")
def _aten_batch_norm(
    context: Context,
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    m: float,
    eps: float,
    *_: Any,
) -> Moments:
    return _batch_norm(context, input, mean, var, weight, bias, training, m, eps)


@register(torch.ops.aten._native_batch_norm_legit_no_training, site="norm", note="of evaluation: affine")
def _aten_batch_norm_inference(
    context: Context, input: Any, weight: Any, bias: Any, mean: Any, var: Any, m: float, eps: float
) -> Any:
    return _batch_norm(context, input, mean, var, weight, bias, False, m, eps), None, None


@register(F.normalize, exactness="approximate", note=NOTE, site="norm")
def _l2_normalize(
    context: Context, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None
) -> Moments:
    if p != 2.0 or not isinstance(dim, int):
        raise context.no_rule(f"normalize(p={p}, dim={dim})", " (p=2 over one dimension has one)")
    return _normalize(context, formulas.l2_normalize_moments, input, dim, eps)
