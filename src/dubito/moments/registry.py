"""The one table of rules: what an operator does to means and variances.

A rule is a function `(context, *args, **kwargs)` with the operator's own signature, in which random tensors are
`Moments`; it returns `Moments`, a tuple of them, or a plain tensor for a result that is not random. It is found by the
function itself, or by name, so that `torch.relu`, `Tensor.relu`, `F.relu`, `Tensor.relu_` and `aten.relu` have one
rule. Both front ends (the eager `GaussianTensor`, the interpreter of exported graphs) call `apply`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from dubito.moments.composition import compose, composed, share_a_base
from dubito.moments.moments import Context, Moments

Exactness = Literal["exact", "approximate"]
Implementation = Callable[..., Any]
_Impl = TypeVar("_Impl", bound=Implementation)


@dataclass(frozen=True)
class Rule:
    """A rule and what is said of it.

    Attributes:
        name: the operator's name.
        implementation: the rule itself; with `passes_function` it gets the operator after the context.
        exactness: "exact" (the moments of the output given independent inputs) or "approximate".
        note: how it is approximated.
        site: the kind of site of calibration: "activation" and "norm" scale the first argument's variance, "pool" and
            "attention" hand the rule `rho=`.
        elementwise: the operator works entry by entry, so that functions of one variable can be taken together.
        passes_function: see `implementation`.
        by_user: registered by `dubito.moments.rule`; its results are always checked.
    """

    name: str
    implementation: Implementation
    exactness: Exactness = "exact"
    note: str = ""
    site: str | None = None
    elementwise: bool = False
    passes_function: bool = False
    by_user: bool = False


BY_FUNCTION: dict[Any, Rule] = {}
BY_NAME: dict[str, Rule] = {}
_NAMED_SPACES = (torch, Tensor, F, torch._C._nn)


def rule(
    *functions: Any,
    exactness: Exactness = "approximate",
    note: str = "rule given by the user",
    site: str | None = None,
) -> Callable[[_Impl], _Impl]:
    """Register a rule for operators: `@dubito.moments.rule(torch.fn)`.

    The function gets a `Context`, then the operator's own arguments, in which random tensors are `Moments` with `mean`
    and `variance`; it returns `Moments(mean, variance)` (or a tuple of them). It serves every way of calling an
    operator of torch by that name (function, method, in place, exported), and replaces a rule there already is.

    Args:
        *functions: operators: `torch.fn`, `torch.nn.functional.fn`, `torch.Tensor.fn`, `torch.ops.library.fn`, or any
            Python function that answers `__torch_function__`.
        exactness: "exact" or "approximate", for the coverage report.
        note: how it is approximated.
        site: "activation" or "norm" where calibration may scale the variance of the first argument.

    Raises:
        TypeError: if no function, or something that cannot be called, is given.
        ValueError: for an unknown `exactness` or `site`.
    """
    if not functions or not all(callable(f) or isinstance(f, OpOverloadPacket) for f in functions):
        raise TypeError("rule wants the operators it is for: @dubito.moments.rule(torch.erfinv)")
    if exactness not in ("exact", "approximate"):
        raise ValueError(f'exactness={exactness!r} must be "exact" or "approximate"')
    if site not in (None, "activation", "norm"):
        raise ValueError(f'site={site!r} must be "activation" or "norm", or None')

    def decorate(implementation: _Impl) -> _Impl:
        for function in functions:
            made = Rule(name_of(function), implementation, exactness, note, site, by_user=True)
            BY_FUNCTION[function] = made
            if _is_of_torch(function):
                BY_NAME[made.name] = made
                for space in _NAMED_SPACES:
                    if getattr(space, made.name, None) in BY_FUNCTION:
                        BY_FUNCTION[getattr(space, made.name)] = made
        resolve.cache_clear()
        return implementation

    return decorate


def register(
    *names_or_functions: Any,
    exactness: Exactness = "exact",
    note: str = "",
    site: str | None = None,
    elementwise: bool = False,
    passes_function: bool = False,
) -> Callable[[_Impl], _Impl]:
    """Register one of the library's own rules: a string is a name in torch, Tensor, F and aten; else that function."""

    def decorate(implementation: _Impl) -> _Impl:
        for key in names_or_functions:
            name = key if isinstance(key, str) else name_of(key)
            made = Rule(name, implementation, exactness, note, site, elementwise, passes_function)
            if isinstance(key, str):
                BY_NAME[key] = made
            else:
                BY_FUNCTION[key] = made
        return implementation

    return decorate


def name_of(function: Any) -> str:
    """An operator's plain name: of `aten.add_.Tensor`, `Tensor.__iadd__` and `torch.add` alike "add" (or "add_")."""
    if isinstance(function, OpOverload):
        function = function.overloadpacket
    if isinstance(function, OpOverloadPacket):
        return str(function._qualified_op_name.split("::")[-1])
    name = getattr(function, "__name__", None) or type(function).__name__
    if name == "__get__":
        name = function.__self__.__name__
    return str(_DUNDERS.get(name, name))  # "__radd__" is "radd"


_BINARY = ("add", "sub", "mul", "matmul", "pow", "mod", "floordiv")
_DUNDERS = {
    f"__{prefix}{n}__": f"{prefix if prefix == 'r' else ''}{n}" for n in _BINARY for prefix in ("", "r")
}
_DUNDERS |= {
    "__truediv__": "div",
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "__div__": "div",
    "__neg__": "neg",
}
_DUNDERS |= {f"__i{n}__": f"{n}_" for n in _BINARY} | {"__itruediv__": "div_", "__idiv__": "div_"}
_DUNDERS |= {"__abs__": "abs", "__pos__": "positive", "__getitem__": "getitem"}


def is_in_place(name: str) -> bool:
    """Whether an operator of this name writes into its first argument."""
    return name.endswith("_") and not name.endswith("__")


def _is_of_torch(function: Any) -> bool:
    """Whether an operator is torch's own, so that its name says what it is."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return name_of_library(function) == "aten"
    module = getattr(function, "__module__", None)
    if module is not None:
        return str(module).split(".")[0] == "torch"
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    return owner is not None


def name_of_library(function: Any) -> str:
    """The library of a `torch.ops` operator, such as "aten"."""
    packet = function.overloadpacket if isinstance(function, OpOverload) else function
    return str(packet._qualified_op_name.split("::")[0])


@functools.lru_cache(maxsize=4096)
def resolve(function: Any) -> Rule | None:
    """The rule for an operator, or None."""
    found = BY_FUNCTION.get(function)
    if found is None and isinstance(function, OpOverload):
        found = BY_FUNCTION.get(function.overloadpacket)
    if found is not None or not _is_of_torch(function):
        return found
    name = name_of(function)
    found = BY_NAME.get(name)
    if found is None and is_in_place(name):
        found = BY_NAME.get(name[:-1])
    return found


@functools.lru_cache(maxsize=1024)
def is_elementwise(function: Any) -> bool:
    """Whether torch itself tags an operator as working entry by entry."""
    if not _is_of_torch(function):
        return False
    name = name_of(function).removesuffix("_")
    if name in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _NOT_SMOOTH:
        return False
    overloads = [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in o.tags for o in overloads) and _returns_real(overloads[0])


_UNTAGGED = frozenset(
    ("log_sigmoid", "logsigmoid", "hardswish", "mish", "softsign", "tanhshrink", "hardshrink")
)
_NOT_SMOOTH = frozenset(
    ("bernoulli", "floor", "ceil", "round", "trunc", "sign", "sgn", "heaviside", "fix", "signbit", "frac")
)


def _returns_real(overload: OpOverload) -> bool:
    comparisons = (
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "is",
        "logical",
        "bitwise",
    )
    return not overload._schema.name.split("::")[-1].startswith(comparisons)


def works_entry_by_entry(function: Any) -> bool:
    """Whether an operator works entry by entry, by its rule or by torch's own tags."""
    found = resolve(function)
    return found.elementwise if found is not None else is_elementwise(function)


def randoms_in(values: Iterable[Any]) -> list[Moments]:
    """The random tensors among arguments, lists included."""
    found: list[Moments] = []
    for value in values:
        if isinstance(value, Moments):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(randoms_in(value))
    return found


def apply(context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operator to arguments some of which are `Moments`: by its rule, else by what is known of it.

    Args:
        context: the propagation.
        function: the operator.
        args, kwargs: its arguments.

    Raises:
        NoRuleError: where there is no rule.
    """
    found = resolve(function)
    kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}  # a write is the front end's
    randoms = randoms_in((*args, *kwargs.values()))
    elementwise = works_entry_by_entry(function)
    if elementwise and (found is None or len(randoms) > 1) and share_a_base(randoms):
        if found is not None and found.name == "mul" and randoms[0] is randoms[1]:
            return apply(context, torch.square, (randoms[0],), {})
        context.note(name_of(function), "approximate", "Gauss-Hermite quadrature")
        return composed(context, function, args, kwargs, randoms)
    if found is None:
        context.note(name_of(function), "none", "")
        raise context.no_rule(name_of(function))
    context.note(found.name, found.exactness, found.note)
    if found.site in ("activation", "norm") and args and isinstance(args[0], Moments):
        args = (context.site(found.site, args[0]), *args[1:])
    prefix = (context, function) if found.passes_function else (context,)
    if found.site in ("pool", "attention"):
        site, rho = context.correlation(found.site)
        result = found.implementation(*prefix, *args, rho=rho, **kwargs)
        context.observe(site, result)
    else:
        result = found.implementation(*prefix, *args, **kwargs)
    if context.check or found.by_user:
        context.checked(found.name, result)
    if found.elementwise and len(randoms) == 1 and isinstance(result, Moments):
        compose(function, args, kwargs, randoms[0], result)
    return result
