"""Which family for which parameter: patterns over a module's parameter names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from dubito.weights.family import Family
from dubito.weights.slots import Slot

Pattern = str | type[nn.Module]
Families = Family | Mapping[Pattern, Family]

REST = "rest"


def assign(module: nn.Module, slots: Sequence[Slot], families: Families) -> list[tuple[Family, list[Slot]]]:
    """The parameters of each pattern, in the mapping's order.

    Args:
        module: the network, for its module names and types.
        slots: its parameters.
        families: one family for all parameters, or a mapping from patterns: a parameter's name, a glob over names, a
            module's name (meaning its parameters), a module class, or `"rest"` for whatever nothing else names.

    Raises:
        TypeError: for something that is neither.
        ValueError: a module without parameters, a pattern that matches nothing, or a parameter that two patterns match.
    """
    if isinstance(families, Family):
        families = {"*": families}
    _check_types(families)
    if not slots:
        raise ValueError(
            f"module {type(module).__name__} has no parameters, so there is nothing to make random"
        )
    taken: dict[str, Pattern] = {}
    result: list[tuple[Family, list[Slot]]] = []
    for pattern, family in families.items():
        if pattern == REST:
            continue
        matched = matching(module, slots, pattern)
        for slot in matched:
            if slot.name in taken:
                raise ValueError(
                    f"parameter {slot.name!r} is matched by two patterns, {show(taken[slot.name])} and "
                    f'{show(pattern)}; make them disjoint, or use "rest" for whatever no other pattern names'
                )
            taken[slot.name] = pattern
        result.append((family, matched))
    if REST in families:
        result.append((families[REST], [slot for slot in slots if slot.name not in taken]))
    return result


def matching(module: nn.Module, slots: Sequence[Slot], pattern: Pattern) -> list[Slot]:
    """The parameters that one pattern names.

    Raises:
        ValueError: if there is none; the message lists the nearest names.
    """
    if isinstance(pattern, type):
        inside = {id(p) for m in module.modules() if isinstance(m, pattern) for p in m.parameters()}
        matched = [slot for slot in slots if id(slot.parameter) in inside]
    elif any(c in pattern for c in "*?["):
        matched = [slot for slot in slots if any(fnmatchcase(name, pattern) for name in slot.aliases)]
    else:
        start = pattern + "."
        matched = [
            slot for slot in slots if any(name == pattern or name.startswith(start) for name in slot.aliases)
        ]
    if not matched:
        raise ValueError(_unmatched(module, slots, pattern))
    return matched


def show(pattern: Pattern) -> str:
    """A pattern as the user wrote it."""
    return repr(pattern) if isinstance(pattern, str) else pattern.__name__


def _check_types(families: object) -> None:
    if isinstance(families, type) and issubclass(families, Family):
        raise TypeError(
            f"families is the class {families.__name__}: give an instance, {families.__name__}(…)"
        )
    if not isinstance(families, Mapping):
        raise TypeError(
            f"families must be a family such as dubito.MeanField() or a mapping from patterns to families, "
            f"not {type(families).__name__}"
        )
    if not families:
        raise ValueError("families is empty: name at least one parameter, or pass one family for all of them")
    for pattern, family in families.items():
        if not isinstance(pattern, str) and not (
            isinstance(pattern, type) and issubclass(pattern, nn.Module)
        ):
            raise TypeError(f"families: the pattern {pattern!r} must be a string or a module class")
        if not isinstance(family, Family):
            hint = f"; write {family.__name__}()" if isinstance(family, type) else ""
            raise TypeError(f"families[{show(pattern)}] must be a family, not {family!r}{hint}")


def _unmatched(module: nn.Module, slots: Sequence[Slot], pattern: Pattern) -> str:
    if isinstance(pattern, type):
        kinds = sorted({type(m).__name__ for m in module.modules() if any(True for _ in m.parameters())})
        return f"no module of class {pattern.__name__} with parameters; there are: {', '.join(kinds)}"
    names = [name for slot in slots for name in slot.aliases]
    modules = [name for name, m in module.named_modules() if name and any(True for _ in m.parameters())]
    near = difflib.get_close_matches(pattern.strip("*."), names + modules, n=5, cutoff=0.3)
    shown = near or names[:5]
    return (
        f"the pattern {pattern!r} matches no parameter; nearest names: {', '.join(map(repr, shown))} "
        "(patterns are parameter names, module names, globs such as '*.weight', module classes, or 'rest')"
    )
