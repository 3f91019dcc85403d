"""How rules of elementwise functions are run: broadcasting, precision, and kernels compiled on request.

A rule is written once as a pure function of (mean, variance). `elementwise` gives it what every one needs: operands
of one shape, half precision computed in single, and, under `fused(True)`, one compiled kernel in place of some
twenty passes over memory.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from dubito.moments.normal_functions import recorded

Moments = tuple[Tensor, Tensor]
P = ParamSpec("P")
Rule = Callable[Concatenate[Tensor, Tensor, P], Moments]

_backend: str | None = None


def compiler_found() -> bool:
    """Whether the C++ compiler that `torch.compile` needs for CPU kernels is installed."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "cl") if name)


class fused:
    """Compile the kernels of activation moments, from now on or inside a `with` block.

    The first call of each kernel compiles (some seconds); later ones take one pass over memory. Results equal the
    eager ones to rounding.

    Args:
        enabled: False returns to eager.
        backend: of `torch.compile`; `"eager"` and `"aot_eager"` need no compiler.

    Raises:
        RuntimeError: for backend `"inductor"` where no C++ compiler is found and no GPU is there.
    """

    def __init__(self, enabled: bool = True, backend: str = "inductor") -> None:
        global _backend
        if enabled and backend == "inductor" and not (compiler_found() or torch.cuda.is_available()):
            raise RuntimeError(
                "fused(True) compiles kernels with backend='inductor', which needs a C++ compiler, and none was "
                "found: install g++ or clang (or set CXX), or leave the moments eager with fused(False)"
            )
        self._before = _backend
        _backend = backend if enabled else None

    def __enter__(self) -> fused:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _backend
        _backend = self._before


def is_fused() -> bool:
    """Whether kernels are compiled at present."""
    return _backend is not None


@functools.lru_cache(maxsize=256)
def _compiled(kernel: Callable[..., Moments], options: tuple[tuple[str, Any], ...], backend: str) -> Any:
    # Not dynamic=True, which makes inputs of the constants too: only the length is marked.
    return torch.compile(functools.partial(kernel, **dict(options)), backend=backend)


def _run(kernel: Callable[..., Moments], mean: Tensor, variance: Tensor, options: dict[str, Any]) -> Moments:
    eager = _backend is None or mean.numel() < 2 or recorded(mean, variance)
    if eager or any(isinstance(o, Tensor) for o in options.values()):
        return kernel(mean, variance, **options)
    assert _backend is not None
    run = _compiled(kernel, tuple(sorted(options.items())), _backend)
    # One flat dimension of any size: one graph serves every shape.
    flat = mean.reshape(-1), variance.reshape(-1)
    for tensor in flat:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    out_mean, out_variance = run(*flat)
    return out_mean.view(mean.shape), out_variance.view(mean.shape)


def elementwise(kernel: Rule[P]) -> Rule[P]:
    """Make a kernel on tensors of one shape and of full precision into a rule for any two that broadcast."""

    def rule(mean: Tensor, variance: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Moments:
        if mean.shape != variance.shape:
            mean, variance = torch.broadcast_tensors(mean, variance)
        options = dict(zip(_option_names(kernel), args, strict=False)) | kwargs
        dtype = mean.dtype
        if dtype in (torch.float16, torch.bfloat16):
            out = _run(kernel, mean.float(), variance.float(), options)
            return out[0].to(dtype), out[1].to(dtype)
        return _run(kernel, mean, variance, options)

    functools.update_wrapper(rule, kernel)
    return rule


@functools.cache
def _option_names(kernel: Callable[..., Moments]) -> tuple[str, ...]:
    code = kernel.__code__  # type: ignore[attr-defined]
    return tuple(code.co_varnames[2 : code.co_argcount])
