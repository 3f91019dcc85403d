"""The rules of normalisation and attention one by one, on what a trained Transformer really gives them.

MiniLM is propagated on eight sentences; the mean and variance that arrive at every layer norm, and at every attention's
queries, keys and values, are kept. Each rule is then compared with draws from just these independent Gaussians: so what
is measured is the rule, not the independence that it assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import dubito
from dubito.moments import Context, GaussianTensor, Moments, propagated
from dubito.moments.attention_moments import attention_moments
from dubito.moments.normalization_moments import NORM_RULES, layer_norm_moments
from propagation_networks import Network, made

Posterior = Callable[[Network, float], dubito.BayesianModule]
FRACTION, ROWS, CHUNK, RULE_DRAWS = (
    0.1,
    12,
    100,
    10,
)  # RULE_DRAWS: draws of a rule's input for one of the weights
Figures = tuple[float, float]


class Attentions(TorchFunctionMode):
    """Keeps the arguments of every fused attention on random tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[list[Moments], Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and all(isinstance(a, GaussianTensor) for a in args[:3]):
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.kept.append(([a.moments.marginal() for a in args[:3]], mask))
        return func(*args, **kwargs)


@torch.no_grad()
def captured(bayes: dubito.BayesianModule, x: Any) -> tuple[list[Moments], Attentions]:
    """What arrives at the layer norms, in order, and at the attentions."""
    norms: list[Moments] = []

    def record(site: str, moments: Moments) -> None:
        if site.rpartition(":")[2].startswith("norm"):
            norms.append(moments.marginal())

    attentions = Attentions()
    with attentions:
        propagated(bayes, x, Context(record=record))
    return norms, attentions


def drawn(
    inputs: list[Moments], function: Callable[..., Tensor], draws: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean and variance of a function of independent Gaussians, in float64."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for start in range(0, draws, CHUNK):
        count = min(CHUNK, draws - start)
        given = [
            m.mean + m.variance.sqrt() * torch.randn((count, *m.mean.shape), generator=generator)
            for m in inputs
        ]
        outputs.append(function(*given))
    whole = torch.cat(outputs)
    centre = whole.mean(0)
    return centre.double(), (whole - centre).square().sum(0).double() / (draws - 1)


def errors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], draws: int) -> Figures:
    """Mean squares: of the log variance's error, and of the mean's in standard deviations; the draws' noise removed."""
    logs = (found[1].double().clamp_min(1e-30).log() - truth[1].log()).square().mean()
    shift = ((found[0].double() - truth[0]).square() / truth[1]).mean()
    return max(float(logs) - 2.0 / (draws - 1), 0.0), max(float(shift) - 1.0 / draws, 0.0)


def rooted(figures: Iterable[Figures]) -> Figures:
    """Root mean squares over the layers."""
    rows = torch.tensor(list(figures), dtype=torch.float64).mean(0).sqrt()
    return float(rows[0]), float(rows[1])


def with_random_variances(moments: Moments, seed: int) -> Moments:
    """The same mean; standard deviations log-normal by feature, about 0.3 of the mean's own spread."""
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(moments.mean.shape[-1], generator=generator).exp()
    sd = 0.3 * moments.mean.std(-1, keepdim=True) * feature
    return Moments(moments.mean, sd.square())


def norm_errors(norms: list[Moments], draws: int) -> dict[str, Figures]:
    """Errors of the rules of layer normalisation."""
    found: dict[str, list[Figures]] = {rule: [] for rule in NORM_RULES}
    for moments in norms:
        width = moments.mean.shape[-1:]
        truth = drawn([moments], lambda x, width=width: F.layer_norm(x, width), draws)
        for rule in NORM_RULES:
            rows = layer_norm_moments((moments.mean, moments.variance), width, rule=rule)
            found[rule].append(errors(rows, truth, draws))
    return {rule: rooted(figures) for rule, figures in found.items()}


def attention_errors(attentions: Attentions, draws: int) -> dict[str, Figures]:
    """Errors of the rules of attention, on the first two sentences."""
    found: dict[str, list[Figures]] = {"mean": [], "delta": []}
    for inputs, mask in attentions.kept:
        parts = [Moments(m.mean[:2], m.variance[:2]) for m in inputs]
        own = None if mask is None else mask[:2]
        truth = drawn(parts, lambda q, k, v, own=own: F.scaled_dot_product_attention(q, k, v, own), draws)
        q, k, v = ((m.mean, m.variance) for m in parts)
        for rule, figures in found.items():
            mean, variance = attention_moments(q, k, v, own, rule=rule)  # type: ignore[arg-type]
            assert variance is not None
            figures.append(errors((mean, variance), truth, draws))
    return {rule: rooted(figures) for rule, figures in found.items()}


def first_rows(moments: Moments) -> Moments:
    """The first tokens of all sentences in turn."""
    flat = Moments(moments.mean.flatten(0, -2), moments.variance.flatten(0, -2))
    step = max(1, len(flat.mean) // ROWS)
    return Moments(flat.mean[::step][:ROWS], flat.variance[::step][:ROWS])


@torch.no_grad()
def rules_table(posterior: Posterior, draws: int = 400, network: Network | None = None) -> str:
    """Root mean square errors of every rule, as a Markdown table.

    Args:
        posterior: makes the network Bayesian, at a fraction of its weights' scale.
        draws: times ten are taken at each layer norm, times two at each attention.
        network: in place of MiniLM.

    Raises:
        MissingError: where MiniLM is not here.
    """
    network = made("MiniLM") if network is None else network
    norms, attentions = captured(posterior(network, FRACTION), network.x)
    real = [first_rows(m) for m in norms]
    made_up = [with_random_variances(m, seed) for seed, m in enumerate(real)]
    lines = [
        "| operator | variances | rule | log-RMSE of variance | RMSE of mean, in sd |",
        "|---|---|---|---:|---:|",
    ]
    for kind, inputs in (("propagated", real), ("random by feature", made_up)):
        for rule, (logs, shift) in norm_errors(inputs, RULE_DRAWS * draws).items():
            lines.append(f"| layer norm × {len(inputs)} | {kind} | `{rule}` | {logs:.3f} | {shift:.3f} |")
    count = len(attentions.kept)
    for rule, (logs, shift) in attention_errors(attentions, 2 * draws).items():
        lines.append(f"| attention × {count} | propagated | `{rule}` | {logs:.3f} | {shift:.3f} |")
    largest = max(
        float(((m.mean - m.mean.mean(-1, keepdim=True)) / m.mean.std(-1, keepdim=True)).abs().max())
        for m in real
    )
    lines += ["", f"The largest channel lies {largest:.0f} standard deviations from its token's mean."]
    return "\n".join(lines)
