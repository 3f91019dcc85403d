"""The second front end: a network's exported graph, run on means and variances by the same table of rules.

`torch.export` gives the network's operators as a flat graph (with a dynamic batch), before anything is propagated. That
serves the coverage report (`coverage.py`) and compiling the whole propagation (`compiled.py`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_unflatten

from dubito.moments.moments import Context, Moments, NoRuleError
from dubito.moments.operands import means
from dubito.moments.registry import apply, is_in_place, name_of, randoms_in, works_entry_by_entry
from dubito.monte_carlo import _unfused, evaluating
from dubito.swap import Swap
from dubito.weights.slots import Slot, find_slots

_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


class ExportError(RuntimeError):
    """The network could not be exported; the eager trace is used where there is one."""


@dataclass
class ExportedNetwork:
    """A network's graph and what it needs to run.

    Attributes:
        program: the exported graph, and the submodules it refers to.
        parameters: by placeholder, the name of the parameter it stands for.
        held: by placeholder, the buffer or constant.
        inputs: placeholders of the tensors among the network's arguments, in order.
        values: by name, the parameters that are not random.
    """

    program: fx.GraphModule
    parameters: dict[str, str]
    held: dict[str, Any]
    inputs: list[str]
    values: dict[str, Tensor]

    def run(self, weights: Mapping[str, Moments], tensors: Sequence[Tensor], context: Context) -> Any:
        """The output's moments (a plain tensor where nothing random reaches it).

        Args:
            weights: moments of the random parameters, by name.
            tensors: the tensors among the network's arguments, in order.
            context: the propagation; `path` follows the graph.
        """
        context.start()
        context.seen.clear()
        known: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for placeholder, name in self.parameters.items():
            known[placeholder] = weights[name] if name in weights else self.values[name]
            if name in weights:
                context.seen.add(name)
        result = _interpret(self.program, {**known, **self.held}, context)
        result = result[0] if isinstance(result, list | tuple) else result
        context.path = ""
        return context.site("output", result.marginal()) if isinstance(result, Moments) else result


def export_network(
    module: nn.Module, x: Any, select: Callable[[Any], Tensor], slots: Sequence[Slot], lock: Any = None
) -> ExportedNetwork:
    """Export a network with a dynamic batch.

    Args:
        module: the network, put into evaluation for the export.
        x: example arguments: a tensor, or a tuple or mapping of arguments.
        select: which part of what it returns is the output.
        slots: the random parameters; those held as factors stand in as meta-free dense zeros of their shape.
        lock: held meanwhile.

    Raises:
        ExportError: where `torch.export` fails; the message says how.
    """
    from dubito.monte_carlo import as_arguments

    args, kwargs = as_arguments(x)
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [_at_least_two(t) for t in leaves if isinstance(t, Tensor)]
    wrapper = _Flat(module, spec, leaves, select)
    shapes = {"tensors": tuple({0: torch.export.Dim.AUTO} if t.ndim else None for t in tensors)}
    empty = [(slot, _placeholder(slot, module)) for slot in slots if not slot.occupied]
    try:
        with evaluating(module), Swap(empty, (), lock), _unfused, torch.no_grad(), _quietly():
            program = torch.export.export(wrapper, tuple(tensors), dynamic_shapes=shapes, strict=False)
            if _writes_into_views(program.graph_module):
                program = program.run_decompositions({})
    except Exception as error:
        raise ExportError(f"torch.export failed with {type(error).__name__}: {_first_line(error)}") from error
    return _read(program, module)


class _Flat(nn.Module):
    """The network as a function of the tensors among its arguments, to its output tensor."""

    def __init__(
        self, module: nn.Module, spec: Any, leaves: list[Any], select: Callable[[Any], Tensor]
    ) -> None:
        super().__init__()
        self.module = module
        self._spec, self._leaves, self._select = spec, leaves, select

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._select(self.module(*args, **kwargs))


def _at_least_two(x: Tensor) -> Tensor:
    """Export takes a length of 1 for a constant."""
    return torch.cat((x, x)) if x.ndim and x.shape[0] == 1 else x


def _placeholder(slot: Slot, module: nn.Module) -> nn.Parameter:
    like = next((p for p in module.parameters()), torch.empty(0))
    return nn.Parameter(torch.zeros(slot.shape, dtype=like.dtype, device=like.device), requires_grad=False)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger = logging.getLogger("torch.export")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else ""


def _read(program: Any, module: nn.Module) -> ExportedNetwork:
    """Which placeholder is what, parameters by the name of their slot."""
    first_name = {alias: slot.name for slot in find_slots(module) for alias in slot.aliases}
    signature = program.graph_signature
    parameters, held = {}, {}
    for placeholder, target in signature.inputs_to_parameters.items():
        name = target.removeprefix("module.")
        parameters[placeholder] = first_name.get(name, name)
    constants = program.constants
    for placeholder, target in signature.inputs_to_buffers.items():
        held[placeholder] = program.state_dict.get(target, constants.get(target))
    for mapping in (signature.inputs_to_lifted_tensor_constants, signature.inputs_to_lifted_custom_objs):
        for placeholder, target in mapping.items():
            held[placeholder] = constants[target]
    values = {first_name.get(n.removeprefix("module."), n): p for n, p in program.state_dict.items()}
    return ExportedNetwork(program.graph_module, parameters, held, list(signature.user_inputs), values)


# ---- running a graph ------------------------------------------------------------------------------------------


def _interpret(program: fx.GraphModule, known: dict[str, Any], context: Context) -> Any:
    random = {name for name, value in known.items() if isinstance(value, Moments)}
    last_use = _last_uses(program, random)
    values: dict[fx.Node, Any] = {}

    def at(node: fx.Node) -> Any:
        return values[node]

    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = known[node.name]
        elif node.op == "get_attr":
            values[node] = _attribute(program, str(node.target))
        elif node.op == "output":
            return fx.map_arg(node.args[0], at)
        else:
            context.path = _path(node)
            args, kwargs = fx.map_arg(node.args, at), fx.map_arg(node.kwargs, at)
            values[node] = _call(node.target, tuple(args), dict(kwargs), context)
            if _mutates(node.target):
                values[node.args[0]] = values[node]
        for dead in last_use.get(node, ()):
            values.pop(dead, None)
    raise RuntimeError("the exported graph has no output")


def _last_uses(program: fx.GraphModule, random: set[str]) -> dict[fx.Node, list[fx.Node]]:
    """Which values are no longer needed after a node.

    Where two functions of one variable meet, the variable is needed too (`composition.py`), though no edge says so.
    """
    bases: dict[fx.Node, fx.Node] = {}
    needed: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in random:
                bases[node] = node
            continue
        found = [bases[n] for n in node.all_input_nodes if n in bases]
        if not found:
            continue
        shared = works_entry_by_entry(node.target) and all(b is found[0] for b in found)
        bases[node] = found[0] if shared else node
        needed[node] = found[:1] if shared and len(found) > 1 else []
    result: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        for used in (*node.all_input_nodes, *needed.get(node, ())):
            if used not in seen:
                seen.add(used)
                result.setdefault(node, []).append(used)
    return result


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
    if getattr(target, "__name__", "") in _INLINED and randoms_in(args):
        at = next(i for i, a in enumerate(args) if isinstance(a, fx.GraphModule))
        names = [n.name for n in args[at].graph.nodes if n.op == "placeholder"]
        return _interpret(args[at], dict(zip(names, args[at + 1 :], strict=True)), context)
    if not randoms_in((*args, *kwargs.values())):
        return target(*args, **kwargs)
    if target is operator.getitem and isinstance(args[0], tuple | list):
        return args[0][args[1]]
    try:
        return apply(context, target, args, kwargs)
    except NoRuleError:
        if not context.survey:
            raise
        return _at_the_mean(target, args, kwargs)


def _at_the_mean(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator without a rule gives at the mean, as if random still: for a report."""
    result = target(*means(args), **{k: means(v) for k, v in kwargs.items()})

    def random(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return Moments(value, torch.zeros_like(value))
        return type(value)(random(v) for v in value) if type(value) in (list, tuple) else value

    return random(result)


def _attribute(program: fx.GraphModule, target: str) -> Any:
    value: Any = program
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _path(node: fx.Node) -> str:
    """The innermost module, by its path in the network."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = ".".join(part.split("@")[0] for part in path.split("."))
    return path.removeprefix("module").removeprefix(".")


def _mutates(target: Any) -> bool:
    return isinstance(target, OpOverload) and is_in_place(name_of(target))


def _views(target: Any) -> bool:
    """Whether an operator's result shares memory with its argument."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def _writes_into_views(program: fx.GraphModule) -> bool:
    """Whether a write reaches memory that another node sees too, which only a functional graph tells apart."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not _mutates(node.target):
            continue
        written = node.args[0]
        shared = written.op == "placeholder" or _views(written.target)
        if shared or any(_views(user.target) for user in written.users if user is not node):
            return True
    return False
