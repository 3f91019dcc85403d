"""Gaussian tensors: what stands in a parameter's slot when mean and variance are propagated.

A `GaussianTensor` is a `torch.Tensor` whose own storage is the mean (so shape, dtype, device, `isinstance`, `data_ptr`
behave), with the variance riding beside it. Every operator on it goes through the table of rules.

Ways of losing the variance would be silent, so each is an error here: an operator below `__torch_function__` (scripted
or compiled code, a C++ extension), a write into a plain tensor, a write into a random parameter, `out=`, and turning
it into numbers (`.item()`, `.numpy()`, `float()`, `bool()`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.moments.moments import Context, Moments, NoRuleError
from dubito.moments.registry import apply, is_elementwise, is_in_place, name_of, resolve
from dubito.moments.single_draw import run_on_draw
from dubito.weights.drawn import METADATA, attention_body

_plain = torch._C.DisableTorchFunctionSubclass

_QUERIES = (
    "data_ptr storage_offset _is_view is_same_size is_set_to is_signed is_conj is_shared is_neg dense_dim layout "
    "_has_symbolic_sizes_strides"
)
_FACTORIES = (
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "isnan isinf isfinite"
)
_NUMBERS = (
    "item tolist numpy __bool__ __int__ __float__ __index__ __complex__ __array__ __contains__ is_nonzero equal "
    "allclose"
)

AT_THE_MEAN: frozenset[Any] = METADATA | {
    getattr(space, name)
    for space in (Tensor, torch)
    for name in f"{_QUERIES} {_FACTORIES}".split()
    if callable(getattr(space, name, None))
}


class GaussianTensor(Tensor):
    """A random tensor: a tensor that is its mean, and a variance.

    Attributes:
        moments: mean and variance, plain tensors (or the structured moments of a weight).
        context: the propagation it belongs to.
        parameter: the name of the parameter whose storage it shares, or None.
    """

    moments: Moments
    context: Context
    parameter: str | None
    aliased: bool

    @classmethod
    def of(cls, moments: Moments, context: Context, parameter: str | None = None) -> GaussianTensor:
        """Wrap moments; the storage of the result is the mean's."""
        self = moments.mean.as_subclass(cls)
        self.moments, self.context, self.parameter = moments, context, parameter
        self.aliased = False
        return self

    @property
    def variance(self) -> Tensor:
        """The variance, a plain tensor."""
        return self.moments.variance

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GaussianTensor(mean={self.moments.mean}, variance={self.moments.variance})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self.context.no_rule("deepcopy")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in AT_THE_MEAN:
            with _plain():
                return func(*_at_mean(args), **{k: _at_mean_of(v) for k, v in kwargs.items()})
        return _operate(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leading = _first(args)
        where = f" in {leading.context.where()}" if leading is not None else ""
        error = NoRuleError(
            f"operator {func}{where} met a random tensor below __torch_function__, where its variance would be lost: "
            "scripted or compiled code, a C++ extension, or a torch.autograd.Function does this. Call the plain Python "
            "code instead (the module as it was before torch.jit.script), or use Monte Carlo: bayes.predict(x)"
        )
        if leading is not None:
            leading.context.failure = error
        raise error


def _at_mean(values: Any) -> list[Any]:
    return [_at_mean_of(v) for v in values]


def _at_mean_of(value: Any) -> Any:
    if isinstance(value, GaussianTensor):
        return value.moments.mean
    return type(value)(_at_mean(value)) if type(value) in (list, tuple) else value


def _as_moments(value: Any) -> Any:
    if isinstance(value, GaussianTensor):
        return value.moments
    if type(value) in (list, tuple):
        return type(value)(_as_moments(v) for v in value)
    return value


def _first(values: Any) -> GaussianTensor | None:
    for value in values:
        if isinstance(value, GaussianTensor):
            return value
        if isinstance(value, list | tuple):
            found = _first(value)
            if found is not None:
                return found
    return None


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leading = _first(args)
    leading = _first(kwargs.values()) if leading is None else leading
    assert leading is not None
    context = leading.context
    name = name_of(func)
    if isinstance(func, torch._C.ScriptMethod | torch._C.ScriptFunction):
        raise context.no_rule(
            f"scripted {name}", ": compiled code would drop its variance; use it unscripted"
        )
    body = _BODIES.get(func)
    if body is None and resolve(func) is None and not is_elementwise(func):
        body = _python_body(func)
    if body is not None:
        return body(*args, **kwargs)
    target = _target_of_write(func, name, args, kwargs, context)
    _count_parameters(args, kwargs, context)
    if context.drawing:
        with _plain():
            result = run_on_draw(
                context, func, _as_moments(args), {k: _as_moments(v) for k, v in kwargs.items()}
            )
            return _drawn(result, target, context)
    with _plain():
        try:
            result = apply(context, func, _as_moments(args), {k: _as_moments(v) for k, v in kwargs.items()})
        except NoRuleError:
            if not context.survey:
                raise
            result = _as_if_random(func(*_at_mean(args), **{k: _at_mean_of(v) for k, v in kwargs.items()}))
        if target is not None:
            return _write(target, result)
        return _wrapped(result, context, args, kwargs)


def _drawn(result: Any, target: GaussianTensor | None, context: Context) -> Any:
    if target is not None:
        target.moments = result
        return target
    if isinstance(result, Moments):
        return GaussianTensor.of(result, context)
    return type(result)(_drawn(r, None, context) for r in result) if type(result) in (list, tuple) else result


def _as_if_random(value: Any) -> Any:
    """What an operator without a rule gave at the mean, for a report that goes on."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return Moments(value, torch.zeros_like(value))
    return type(value)(_as_if_random(v) for v in value) if type(value) in (list, tuple) else value


def _count_parameters(args: Any, kwargs: dict[str, Any], context: Context) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, GaussianTensor):
            if value.parameter is not None:
                context.seen.add(value.parameter)
        elif isinstance(value, list | tuple):
            _count_parameters(value, {}, context)


def _wrapped(result: Any, context: Context, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(result, Moments):
        return _wrap_one(result, context, args, kwargs)
    if isinstance(result, tuple | list):
        made = [_wrapped(r, context, args, kwargs) for r in result]
        return type(result)(made) if type(result) in (tuple, list) else type(result)(*made)
    return result


def _wrap_one(result: Moments, context: Context, args: Any, kwargs: dict[str, Any]) -> GaussianTensor:
    parameter, aliased = None, False
    storage = result.mean.untyped_storage()._cdata
    for value in (*args, *kwargs.values()):
        if not isinstance(value, GaussianTensor):
            continue
        if value.moments is result:
            return value  # an identity, as in torch
        if value.moments.mean.untyped_storage()._cdata == storage:
            parameter, aliased = value.parameter, True
            value.aliased = True
        elif value.moments._variance is result._variance and type(result) is Moments:
            kept = result.origin
            result = Moments(
                result.mean, result.variance.clone()
            )  # what is written into one must not reach the other
            result.origin = kept
    made = GaussianTensor.of(result, context, parameter)
    made.aliased = aliased
    return made


# ---- writes ------------------------------------------------------------------------------------------------


def _target_of_write(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> GaussianTensor | None:
    """The tensor that an operator writes into, or None.

    Raises:
        NoRuleError: for a write that would lose a variance or change a parameter.
    """
    if kwargs.get("out") is not None:
        raise context.no_rule(f"{name}(out=…)", ": out= would drop the variance")
    if name in _NUMBERS.split():
        raise context.no_rule(name, ": it asks for one number of a random tensor, which has none")
    in_place = is_in_place(name) or name == "__setitem__" or kwargs.get("inplace") is True
    if not in_place or func is Tensor.requires_grad_:
        return None
    target = args[0]
    if not isinstance(target, GaussianTensor):
        raise NoRuleError(
            f"{name} in {context.where()} writes a random value into a plain tensor of shape {tuple(target.shape)}, "
            "which cannot hold its variance. Build the result by torch.cat, torch.stack or torch.where instead of "
            "writing into a buffer (x = x + y instead of x += y), or use Monte Carlo: bayes.predict(x)"
        )
    if target.parameter is not None:
        raise NoRuleError(
            f"{name} in {context.where()} writes into the random parameter {target.parameter!r}: the write would "
            "change the posterior's mean. Write into a copy: weight.clone()"
        )
    return target


def _write(target: GaussianTensor, result: Any) -> GaussianTensor:
    """Let `target` hold `result`: its views share the memory written, anything else gets new memory."""
    if not isinstance(result, Moments):
        result = Moments(result, torch.zeros_like(result))
    old = target.moments
    if result is old:
        return target
    mean, variance = result.mean.to(old.dtype), result.variance.to(old.dtype)
    if mean.shape != old.shape:
        mean, variance = mean.expand(old.shape).clone(), variance.expand(old.shape).clone()
    if target.aliased:
        old.mean.copy_(mean)
        old.variance.copy_(variance)
        old._second, old.origin = None, None
        return target
    target.moments = Moments(mean, variance.clone() if variance is old.variance else variance)
    target.moments.origin = result.origin
    target.data = mean.detach()
    return target


# ---- Python functions without a rule -------------------------------------------------------------------------

_BODIES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: attention_body,
    # asked whether padding allows nested tensors, which have no rules
    torch._nested_tensor_from_mask_left_aligned: lambda *_: False,
}


def _python_body(func: Any) -> Callable[..., Any] | None:
    """A copy of one of torch's own Python functions that goes on where it would ask for an override."""
    if func in _BODIES:
        return _BODIES[func]
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith(
        ("torch.nn.functional", "torch.functional")
    ):
        return None
    gates = {n: _answers_false for n in func.__code__.co_names if n.startswith("has_torch_function")}
    if not gates:
        return None
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **gates}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    _BODIES[func] = body
    return body


def _answers_false(*_: Any) -> bool:
    return False
