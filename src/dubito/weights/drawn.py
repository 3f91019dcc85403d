"""Structured drawn weights: tensors that stand for a drawn weight without being one.

A `DrawnWeight` is put in a parameter's slot for one call. An operator that has a rule for its kind uses the
structure (`F.linear` with factors never forms the dense weight); any other operator gets the dense draw, made
once. Metadata (`shape`, `dtype`, `requires_grad`, …) answers without drawing.

Three ways of losing the structure would be silent, so each is an error here: writing into a drawn weight in
place (the write would vanish with the draw), reaching an operator below `__torch_function__` (the wrapper has
no storage), and a gradient that arrives at the wrapper itself, as `torch.autograd.Function.apply` brings about.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from dubito.weights.family import DubitoWarning

Rule = Callable[..., Any]
_T = TypeVar("_T", bound="DrawnWeight")
_RuleT = TypeVar("_RuleT", bound=Rule)

_GETTERS = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "_version",
    "output_nr",
    "retains_grad",
    "names",
    "is_cuda",
    "is_cpu",
    "is_mps",
    "is_xpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "itemsize",
    "nbytes",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "element_size",
    "get_device",
    "stride",
    "is_contiguous",
    "__len__",
    "__hash__",
    "register_hook",
    "is_inference",
    "is_pinned",
)
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, n).__get__ for n in _GETTERS if hasattr(Tensor, n)]
    + [getattr(Tensor, n) for n in _METHODS if hasattr(Tensor, n)]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)


def _escaped(gradient: Tensor) -> Tensor:
    raise RuntimeError(
        "a gradient reached a structured drawn weight itself and would be lost: an autograd Function (or other "
        "compiled operator) took the drawn weight without going through __torch_function__. Use the family's "
        'estimator "weights", which hands dense draws to every operator, or call the Function on weight.clone()'
    )


class DrawnWeight(Tensor):
    """Base of the structured drawn weights; see the module's text."""

    rules: ClassVar[dict[Any, Rule]] = {}

    @property
    def estimator(self) -> str | None:
        """The estimator that an operator without a rule does without, if any ("local", "flipout")."""
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.rules = dict(cls.rules)

    @classmethod
    def wrap(cls: type[_T], shape: Iterable[int], tensors: Iterable[Tensor]) -> _T:
        """A wrapper with the metadata of the parameter it stands for; the first tensor gives dtype and device."""
        parts = tuple(tensors)
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in parts)
        self: _T = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=parts[0].dtype, device=parts[0].device, requires_grad=needs
        )
        if needs:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_escaped)
        self._memo = {}
        return self

    _memo: dict[bool, Tensor]

    def draw_dense(self) -> Tensor:
        """Form the dense draw (called at most once for each gradient mode)."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The dense draw. One with a graph serves everywhere; one made under `no_grad` only there."""
        for with_gradient in (True,) if torch.is_grad_enabled() else (True, False):
            if with_gradient in self._memo:
                return self._memo[with_gradient]
        with _quiet(), without_autocast(self.device.type):
            value = self.draw_dense()
        self._memo[torch.is_grad_enabled()] = value
        return value

    def progress(self) -> Any:
        """What has been drawn so far; kept when an activation-checkpointed block is entered."""
        return dict(self._memo)

    def rewind(self, progress: Any) -> None:
        """Go back to that point, so that the block, run again, makes what it made and finds what it found."""
        self._memo = dict(progress)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for kind in types:
            rule = kind.rules.get(func) if issubclass(kind, DrawnWeight) else None
            if rule is not None:
                result = rule(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        _refuse_write(func, args, kwargs)
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, DrawnWeight) and value.estimator and not value._memo:
                say_fallback(value.estimator, getattr(func, "__name__", str(func)))
        args, kwargs = tree_map(as_dense, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(
            f"operator {func} met a structured drawn weight below __torch_function__ (scripted or compiled code "
            'does this). Use the family\'s estimator "weights", which hands dense draws to every operator'
        )


_said: ContextVar[set[tuple[str, str]] | None] = ContextVar("said", default=None)


@contextlib.contextmanager
def saying_once(said: set[tuple[str, str]]) -> Iterator[None]:
    """A call of a network: what it has `said` it does not say again."""
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def say_fallback(estimator: str, operator: str) -> None:
    """Warn that an operator got one shared draw in place of `estimator`; once for each network and operator."""
    said = _said.get()
    if said is None or (estimator, operator) in said:
        return
    said.add((estimator, operator))
    warnings.warn(
        f'estimator="{estimator}" has no rule for {operator}: there the call uses one draw of the weight, shared by '
        'the batch (estimator="weights"). Said once',
        DubitoWarning,
        stacklevel=4,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A dense draw is being made: the operators that make it have no estimator to lose."""
    token = _said.set(None)
    try:
        yield
    finally:
        _said.reset(token)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """`torch.autocast` switched off; free where it is not on."""
    # devices without mixed precision, such as "meta", may not even be asked
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def as_dense(value: Any) -> Any:
    """The dense draw of a drawn weight; anything else unchanged."""
    return value.dense() if isinstance(value, DrawnWeight) else value


def rule(kind: type[DrawnWeight], *functions: Any) -> Callable[[_RuleT], _RuleT]:
    """Register a rule: how `functions` act on drawn weights of `kind`.

    The rule has the function's own signature and returns `NotImplemented` where it does not apply.
    """

    def register(implementation: _RuleT) -> _RuleT:
        for function in functions:
            kind.rules[function] = implementation
        return implementation

    return register


def _refuse_write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _ARITHMETIC)
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if args else None
    if (in_place and isinstance(target, DrawnWeight)) or isinstance(kwargs.get("out"), DrawnWeight):
        raise RuntimeError(
            f"{name} writes into a drawn weight, and the write would vanish with the draw: change the parameters "
            "of the posterior outside the call (under torch.no_grad()), or write into a copy: weight.clone()"
        )


_ARITHMETIC = frozenset(
    (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
        "div",
    )
)


# nn.MultiheadAttention hands all its weights to this function, whose Python body needs none of them dense. A copy
# of it whose test for tensor subclasses answers False runs that body; the operators inside still meet our rules.
attention_body: Callable[..., Any] = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
attention_body.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__
DrawnWeight.rules[F.multi_head_attention_forward] = attention_body
