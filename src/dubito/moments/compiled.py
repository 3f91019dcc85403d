"""The whole propagation as one compiled graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dubito.moments.coverage import tensors_of
from dubito.moments.elementwise import compiler_found
from dubito.moments.exported import ExportedNetwork, ExportError, export_network
from dubito.moments.moments import Calibrator, Context, Moments
from dubito.moments.propagate import (
    are_valid,
    check_calibration,
    condensed,
    gaussian_weights,
    predictive_of,
    propagated,
    refuse_recurrent,
    streamed,
)
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.predictive import Predictive
from dubito.weights.family import DubitoWarning

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule


class CompiledPropagation:
    """A propagation of one network, compiled whole; made by `dubito.moments.compiled`.

    It holds the posterior's moments as they were: call `refresh()` after training.

    Attributes:
        graph: the flat graph that is compiled, or None where the network could not be exported and the eager
            propagation runs instead.
    """

    def __init__(
        self,
        bayes: BayesianModule,
        example: Any,
        rules: RuleSet,
        calibration: Calibrator | None,
        backend: Any,
    ) -> None:
        self._bayes, self._rules, self._calibration = bayes, rules, calibration
        self.graph: fx.GraphModule | None = None
        self._run: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.refresh()
        try:
            slots = list(bayes._slots.values())
            self._network = export_network(bayes.module, example, bayes.select, slots, bayes._lock)
        except ExportError as error:
            warnings.warn(
                f"the propagation cannot be compiled whole ({error}); it runs eagerly. dubito.moments.fused(True) "
                "compiles the kernels of its activations",
                DubitoWarning,
                stacklevel=3,
            )
            return
        self.graph = _traced(self._network, self._weights, Context(rules, calibration))
        self._run = torch.compile(self.graph, backend=backend)

    def refresh(self) -> None:
        """Take the posterior's moments as they are now."""
        with torch.no_grad():
            self._weights = condensed(gaussian_weights(self._bayes), self._rules)
            self._tensors = [t.detach() for m in self._weights.values() for t in _parts(m)]

    @torch.no_grad()
    def moments(self, x: Any) -> Moments:
        """Mean and variance of the network's outputs for one batch.

        Raises:
            InvalidMomentsError: where they are NaN or negative.
        """
        if self._run is None:
            return propagated(self._bayes, x, Context(self._rules, self._calibration), self._weights)
        tensors = tensors_of(x)
        for tensor in tensors:
            if tensor.ndim:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        result = Moments(*self._run(*tensors, *_fixed(self._network), *self._tensors))
        if not are_valid(result):  # once more, eagerly, which names the operator
            return propagated(self._bayes, x, Context(self._rules, self._calibration), self._weights)
        return result

    def __call__(self, x: Any, head: str = "sampled") -> Predictive:
        """The predictive, as `bayes.propagate(x)`; loaders stream."""

        def one(batch: Any) -> Predictive:
            return predictive_of(self._bayes, self.moments(batch), head, self._calibration)

        return streamed(self._bayes, x, one)


def compiled(
    bayes: BayesianModule,
    example: Any,
    *,
    rules: str | RuleSet = "cvp",
    calibration: Calibrator | None = None,
    backend: Any = "inductor",
) -> CompiledPropagation:
    """Compile the whole propagation of a network: a callable that answers as `bayes.propagate`.

    The network is exported with a dynamic batch, its propagation is written out as one flat graph of plain operators,
    and that is given to `torch.compile`. A network that cannot be exported runs eagerly, with a warning.

    Args:
        bayes: the network.
        example: arguments as in `propagate`, for shapes and dtypes.
        rules: the rule set.
        calibration: taken into the graph.
        backend: of `torch.compile`; "eager" and "aot_eager" need no compiler.

    Raises:
        RuntimeError: for backend "inductor" where no C++ compiler is found (on a CPU).
        NoRuleError: for an operator without a rule.
    """
    refuse_recurrent(bayes.module)
    if backend == "inductor" and not (compiler_found() or torch.cuda.is_available()):
        raise RuntimeError(
            'backend="inductor" needs a C++ compiler, and none was found: install g++ or clang (or set CXX), or use '
            "bayes.propagate(x), which needs none"
        )
    chosen = rule_set(rules)
    check_calibration(bayes, calibration, chosen)
    return CompiledPropagation(bayes, example, chosen, calibration, backend)


def _traced(network: ExportedNetwork, weights: Mapping[str, Moments], context: Context) -> fx.GraphModule:
    """The propagation as a graph of plain operators, over (inputs, what is not random, moments of weights).

    Inputs are the export's own shape-only tensors, so the batch stays as dynamic as it is there.
    """
    examples = {n.name: n.meta["val"] for n in network.program.graph.nodes if n.op == "placeholder"}
    inputs = [examples[name] for name in network.inputs]
    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None

    def fake(value: Tensor) -> Tensor:
        return mode.from_tensor(value.detach(), static_shapes=True)

    fixed = [fake(t) for t in _fixed(network)]
    parts = [fake(t) for m in weights.values() for t in _parts(m)]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = iter(tensors[len(inputs) :])
        held = {n: next(given) if isinstance(v, Tensor) else v for n, v in network.held.items()}
        values = {n: next(given) for n in network.values}
        rebuilt = {n: _rebuilt(m, given) for n, m in weights.items()}
        program = ExportedNetwork(network.program, network.parameters, held, network.inputs, values)
        result = program.run(rebuilt, tensors[: len(inputs)], context)
        return result.mean, result.variance

    with torch.no_grad():
        graph: fx.GraphModule = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            *inputs, *fixed, *parts
        )
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fixed(network: ExportedNetwork) -> list[Tensor]:
    return [v for v in network.held.values() if isinstance(v, Tensor)] + list(network.values.values())


# ---- moments as flat lists of tensors ---------------------------------------------------------------------------


def _slots_of(moments: Moments) -> list[str]:
    names = [name for kind in type(moments).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted(n for n in names if n not in ("__weakref__", "origin") and hasattr(moments, n))


def _parts(moments: Moments) -> list[Tensor]:
    """The tensors that moments are made of; what weights keep between calls is made first."""
    if type(moments) is Moments and moments.ndim >= 2:
        _ = moments.second
    result: list[Tensor] = []
    for name in _slots_of(moments):
        value = getattr(moments, name)
        if isinstance(value, Moments):
            result.extend(_parts(value))
        elif isinstance(value, Tensor):
            result.append(value)
    return result


def _rebuilt(moments: Moments, tensors: Any) -> Moments:
    """The same moments of other tensors, taken from an iterator in the order of `_parts`."""
    made = copy.copy(moments)
    made.origin = None
    for name in _slots_of(moments):
        value = getattr(moments, name)
        if isinstance(value, Moments):
            setattr(made, name, _rebuilt(value, tensors))
        elif isinstance(value, Tensor):
            setattr(made, name, next(tensors))
    return made
