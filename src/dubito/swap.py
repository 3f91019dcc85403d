"""Replace parameters for the length of one call.

The module is never rewritten: the entries of its `_parameters` dictionaries are exchanged, and put back
whatever happens. Swaps nest (the inner one restores what the outer one installed) and are kept apart
between threads by the lock of the `BayesianModule` that makes them.

Activation checkpointing runs part of the forward pass again during backward, when the swap has ended: it
would silently use the means. `torch.utils.checkpoint` is therefore told to remember the swaps under which a
function was first run and to install them again for the second run; where no swap is active it behaves as
it always did.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from dubito.weights.drawn import DrawnWeight
from dubito.weights.slots import Slot

Lock = Any  # threading.RLock is a factory, not a type

_active: ContextVar[tuple[Swap, ...]] = ContextVar("active_swaps", default=())


class Swap:
    """A context in which `values` stand in their slots.

    Args:
        values: what replaces each parameter: a tensor or a structured drawn weight.
        recurrent: the `nn.RNNBase` modules among the slots' owners.
        lock: held while the swap is installed.
        inline: run checkpointed functions like any other: what stands in the slots cannot be run again later.
    """

    def __init__(
        self,
        values: Sequence[tuple[Slot, Tensor]],
        recurrent: Sequence[nn.RNNBase],
        lock: Lock | None = None,
        inline: bool = False,
    ) -> None:
        self.values = values
        self.recurrent = recurrent
        self.inline = inline
        self.lock = lock if lock is not None else threading.RLock()
        self._undo: list[list[tuple[Slot, bool, list[Tensor | None]]]] = []
        self._tokens: list[Any] = []

    def __enter__(self) -> Swap:
        self.lock.acquire()
        undo: list[tuple[Slot, bool, list[Tensor | None]]] = []
        for slot, value in self.values:
            before: list[Tensor | None] = []
            for owner, attribute in slot.places:
                parameters: dict[str, Any] = owner._parameters
                before.append(parameters[attribute])
                parameters[attribute] = value
            outermost = slot.held is None and before[0] is not None
            if outermost:
                slot.held = before[0]
            undo.append((slot, outermost, before))
        for rnn in self.recurrent:
            rnn._init_flat_weights()
        self._undo.append(undo)
        self._tokens.append(_active.set((*_active.get(), self)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.reset(self._tokens.pop())
        for slot, outermost, before in reversed(self._undo.pop()):
            for (owner, attribute), value in zip(slot.places, before, strict=True):
                parameters: dict[str, Any] = owner._parameters
                parameters[attribute] = value
            if outermost:
                slot.held = None
        for rnn in self.recurrent:
            rnn._init_flat_weights()
        self.lock.release()


class _Replay:
    """A checkpointed function that runs again under the swaps, and from the point in their draws, of its first run."""

    def __init__(self, function: Callable[..., Any], swaps: tuple[Swap, ...], first: bool) -> None:
        self.function = function
        self.swaps = swaps
        self.first = first
        drawn = (value for swap in swaps for _, value in swap.values if isinstance(value, DrawnWeight))
        self.progress = [(value, value.progress()) for value in drawn]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.first:
            self.first = False
            return self.function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for swap in self.swaps:
                stack.enter_context(swap)
            for value, then in self.progress:
                stack.callback(value.rewind, value.progress())
                value.rewind(then)
            return self.function(*args, **kwargs)


def _remembering(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """The function with its swaps; `first` says whether its first run goes through what is returned."""
    swaps = _active.get()
    return _Replay(function, swaps, first) if swaps else function


_original_generator = checkpointing._checkpoint_without_reentrant_generator
_OriginalFunction = checkpointing.CheckpointFunction


def _run_inline() -> bool:
    return any(swap.inline for swap in _active.get())


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    if _run_inline():
        return iter((None,))
    generator: Iterator[None] = _original_generator(_remembering(function, first=False), *args, **kwargs)
    return generator


class _CheckpointFunction(_OriginalFunction):  # type: ignore[misc, valid-type]
    @classmethod
    def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
        if _run_inline():
            return function(*args[1:])  # after `preserve_rng_state`
        return _OriginalFunction.apply(_remembering(function, first=True), *args)


def watch_checkpointing() -> None:
    """Let `torch.utils.checkpoint` remember swaps (idempotent; inert where no swap is active)."""
    checkpointing._checkpoint_without_reentrant_generator = _generator  # type: ignore[assignment]
    checkpointing.CheckpointFunction = _CheckpointFunction  # type: ignore[misc]
