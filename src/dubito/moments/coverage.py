"""Which operators of a network have a rule, and how good it is: said before anything is propagated."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dubito.moments.exported import ExportedNetwork, ExportError, export_network
from dubito.moments.moments import Context, Moments, NoRuleError, Used
from dubito.moments.propagate import gaussian_weights, propagated, refuse_recurrent
from dubito.moments.rule_sets import RuleSet, rule_set
from dubito.monte_carlo import as_arguments

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule


@dataclass(frozen=True)
class Coverage:
    """The operators that meet random tensors in one pass of a network.

    Attributes:
        uses: every use of a rule, in order.
        unused: random parameters that no operator met.
        source: "export" (the exported graph; nothing was computed) or "trace" (one propagation of the example, where
            the network cannot be exported).
        problem: why it could not be exported, or why the trace stopped; None where all went well.
    """

    uses: tuple[Used, ...]
    unused: tuple[str, ...]
    source: str
    problem: str | None = None

    def of(self, exactness: str) -> list[Used]:
        """The uses of one kind, "exact", "approximate" or "none", each once."""
        return list(dict.fromkeys(u for u in self.uses if u.exactness == exactness))

    @property
    def exact(self) -> list[Used]:
        """Operators whose rule is exact for independent inputs, by module."""
        return self.of("exact")

    @property
    def approximate(self) -> list[Used]:
        """Operators whose rule is an approximation, by module."""
        return self.of("approximate")

    @property
    def missing(self) -> list[Used]:
        """Operators without a rule, by module: propagation stops there."""
        return self.of("none")

    @property
    def complete(self) -> bool:
        """Whether the network can be propagated."""
        return not self.missing and (self.source == "export" or self.problem is None or not self._stopped)

    @property
    def _stopped(self) -> bool:
        return self.problem is not None and self.problem.startswith("stopped")

    def __str__(self) -> str:
        lines = [f"{self._headline()}"]
        counts: Counter[tuple[str, str, str]] = Counter()
        places: dict[tuple[str, str, str], list[str]] = {}
        for use in self.uses:
            key = (use.exactness, use.operator, use.note)
            counts[key] += 1
            found = places.setdefault(key, [])
            if use.path not in found:
                found.append(use.path)
        order = {"none": 0, "approximate": 1, "exact": 2}
        for key in sorted(counts, key=lambda k: (order[k[0]], k[1])):
            exactness, operator, note = key
            where = ", ".join(p or "forward" for p in places[key][:3])
            more = f" and {len(places[key]) - 3} more" if len(places[key]) > 3 else ""
            rule = "no rule" if exactness == "none" else exactness
            lines.append(
                f"  {rule:<12}{operator:<32}× {counts[key]:<5}{where}{more}{f'  ({note})' if note else ''}"
            )
        if self.unused:
            lines.append(f"  random parameters that nothing used: {', '.join(self.unused)}")
        return "\n".join(lines)

    def _headline(self) -> str:
        source = "exported graph" if self.source == "export" else "traced with the example"
        said = f" [{self.problem}]" if self.problem else ""
        total = len(self.uses)
        parts = [
            f"{len([u for u in self.uses if u.exactness == e])} {e}" for e in ("exact", "approximate", "none")
        ]
        return f"{total} operators on random tensors: {', '.join(parts)} ({source}){said}"


def report(module: nn.Module, example: Any, rules: str | RuleSet = "cvp") -> Coverage:
    """Say which operators of a network have an exact rule, an approximation, or none, module by module.

    The network is exported (`torch.export`) and its graph is read; no moments are computed. A network that cannot be
    exported is run once on the example, which the report says.

    Args:
        module: a `BayesianModule`, or any module, of which all parameters are then taken as random.
        example: arguments as in `propagate`: a tensor, a tuple or a mapping.
        rules: the rule set.

    Raises:
        NoRuleError: for recurrent layers.
    """
    bayes = _as_bayesian(module)
    refuse_recurrent(bayes.module)
    context = Context(rule_set(rules), used=[], survey=True)
    try:
        network = export_network(
            bayes.module, example, bayes.select, list(bayes._slots.values()), bayes._lock
        )
    except ExportError as error:
        return _traced(bayes, example, context, str(error))
    problem = _walk(bayes, network, tensors_of(example), context)
    return _coverage(bayes, context, "export", problem)


def tensors_of(x: Any) -> list[Tensor]:
    """The tensors among a network's arguments, in order."""
    return [leaf for leaf in tree_leaves(as_arguments(x)) if isinstance(leaf, Tensor)]


def _as_bayesian(module: nn.Module) -> BayesianModule:
    from dubito.bayesian import BayesianModule
    from dubito.conversion import bayesianize
    from dubito.weights.mean_field import MeanField

    return module if isinstance(module, BayesianModule) else bayesianize(copy.deepcopy(module), MeanField())


def _walk(
    bayes: BayesianModule, network: ExportedNetwork, tensors: Sequence[Tensor], context: Context
) -> str | None:
    """Run the rules on tensors that have shapes and no values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():

        def fake(value: Any) -> Any:
            return mode.from_tensor(value.detach()) if isinstance(value, Tensor) else value

        weights = {}
        for name, slot in bayes._slots.items():
            like = next(bayes.parameters())
            mean = torch.empty(slot.shape, dtype=like.dtype, device=like.device)
            weights[name] = Moments(mean, torch.empty_like(mean))
        shapes = ExportedNetwork(
            network.program,
            network.parameters,
            {n: fake(v) for n, v in network.held.items()},
            network.inputs,
            {n: fake(v) for n, v in network.values.items()},
        )
        try:
            shapes.run(weights, [fake(t) for t in tensors], context)
        except Exception as error:
            return f"stopped at {context.where()}: {type(error).__name__}: {error}"
    return None


def _traced(bayes: BayesianModule, example: Any, context: Context, problem: str) -> Coverage:
    with torch.no_grad():
        try:
            propagated(bayes, example, context, gaussian_weights(bayes))
        except NoRuleError as error:
            problem = f"stopped: {error}; {problem}"
    return _coverage(bayes, context, "trace", problem)


def _coverage(bayes: BayesianModule, context: Context, source: str, problem: str | None) -> Coverage:
    unused = tuple(name for name in bayes._slots if name not in context.seen)
    return Coverage(tuple(context.used or ()), unused, source, problem)
