"""Looking at a posterior: what it holds, what it costs, how far it spreads, and what is wrong with it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule, joint_kl
from dubito.monte_carlo import evaluating
from dubito.priors import WeightPrior
from dubito.weights.family import CapabilityError, WeightPosterior

#: A posterior whose standard deviation is below this fraction of its mean's scale does not spread.
NO_SPREAD = 1e-6
#: A posterior whose standard deviation fell below this fraction of where it started has collapsed.
COLLAPSED = 0.05
#: Draws whose predictions differ by less than this fraction of the predictions' own scale are identical.
IDENTICAL = 1e-5
#: A median signal-to-noise ratio below this everywhere means that the noise has swamped the weights.
SWAMPED = 0.05


@dataclass(frozen=True)
class WeightSpread:
    """How far one random parameter spreads, in the parameter's own units.

    Attributes:
        name: the parameter.
        family: its family.
        numel: how many entries.
        sd: root mean square over the entries of the posterior standard deviation.
        scale: root mean square of the posterior mean (NaN where no closed form exists).
        snr: median over the entries of |mean| / standard deviation (infinite at sd 0; NaN without a mean).
        diagonal: whether the posterior's covariance is diagonal.
    """

    name: str
    family: str
    numel: int
    sd: float
    scale: float
    snr: float
    diagonal: bool


@dataclass(frozen=True)
class SummaryRow:
    """One posterior in a `Summary`.

    Attributes:
        parameters: names of the module's parameters it covers.
        family: the posterior's family.
        numel: entries of those parameters.
        added: parameters that the posterior stores beyond the dense ones (negative where it stores fewer).
        added_bytes: their size in memory.
        kl: KL(q || prior) in nats, or None where it is infinite or undefined.
        sd: root mean square of the posterior standard deviation.
        snr: median over the covered parameters of their median signal-to-noise ratio.
    """

    parameters: tuple[str, ...]
    family: str
    numel: int
    added: int
    added_bytes: int
    kl: float | None
    sd: float
    snr: float


@dataclass(frozen=True)
class Summary:
    """A posterior at a glance; `print` it.

    Attributes:
        rows: one a posterior.
        parameters: entries of the plain module's trainable parameters.
        added: parameters stored beyond the plain module's.
        added_bytes: their size in memory.
        kl: the total in nats, or None where a part is infinite or undefined.
        deterministic: entries that have no posterior.
    """

    rows: tuple[SummaryRow, ...]
    parameters: int
    added: int
    added_bytes: int
    kl: float | None
    deterministic: int

    def __str__(self) -> str:
        head = ("parameters", "family", "entries", "added", "bytes", "KL (nats)", "sd", "median SNR")
        cells = [head]
        for row in self.rows:
            figures = (f"{row.numel:,}", f"{row.added:+,}", f"{row.added_bytes:+,}", _nats(row.kl))
            cells.append((_names(row.parameters), row.family, *figures, f"{row.sd:.3g}", f"{row.snr:.3g}"))
        if self.deterministic:
            cells.append(("(not random)", "", f"{self.deterministic:,}", "+0", "+0", "", "", ""))
        total = (f"{self.parameters:,}", f"{self.added:+,}", f"{self.added_bytes:+,}", _nats(self.kl))
        cells.append(("total", "", *total, "", ""))
        widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
        lines = [
            "  ".join(
                c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        rule = "-" * len(lines[0])
        return "\n".join(
            [lines[0].rstrip(), rule, *(text.rstrip() for text in lines[1:-1]), rule, lines[-1].rstrip()]
        )


@torch.no_grad()
def spread(bayes: BayesianModule) -> dict[str, WeightSpread]:
    """How far each random parameter spreads, by its name.

    Compare two results, before and after training, to see which parameters the data have pinned down and
    which have collapsed to a point.
    """
    found: dict[str, WeightSpread] = {}
    for posterior in bayes.posteriors():
        variances = posterior.variance()
        try:
            means: Mapping[str, Tensor] = posterior.mean()
        except CapabilityError:
            means = {}
        for slot in posterior.slots:
            found[slot.name] = _spread_of(
                slot.name, type(posterior), variances[slot.name], means.get(slot.name), posterior.diagonal
            )
    return found


@torch.no_grad()
def summary(bayes: BayesianModule) -> Summary:
    """What the posterior holds and costs: family, parameters, added parameters and bytes, KL, spread and SNR.

    Monte Carlo KLs are estimated with a fixed seed; no global random state is touched.
    """
    spreads = spread(bayes)
    divergences = _kls(bayes)
    rows = tuple(_row(p, spreads, divergences[id(p)]) for p in bayes.posteriors())
    random_names = {name for row in rows for name in row.parameters}
    own = {id(p): p.numel() for p in bayes.module.parameters() if p.requires_grad}
    covered = {id(s.parameter) for p in bayes.posteriors() for s in p.slots if not p.takes_over}
    deterministic = sum(count for key, count in own.items() if key not in covered)
    kls = [row.kl for row in rows]
    return Summary(
        rows=rows,
        parameters=deterministic + sum(spreads[name].numel for name in random_names),
        added=sum(row.added for row in rows),
        added_bytes=sum(row.added_bytes for row in rows),
        kl=None if any(kl is None for kl in kls) else math.fsum(kl for kl in kls if kl is not None),
        deterministic=deterministic,
    )


def prediction_spread(bayes: BayesianModule, x: Any, samples: int = 4) -> float:
    """Standard deviation of the outputs over draws of the weights, relative to the outputs' own scale.

    Args:
        bayes: the Bayesian module; evaluated without dropout and with its flags put back.
        x: the inputs, as for `BayesianModule.outputs`.
        samples: how many draws (at least 2).

    Returns:
        Root mean square over the outputs of their standard deviation over draws, divided by the root mean
        square of the outputs. 0 means that every draw predicts the same.

    Raises:
        ValueError: fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"samples must be at least 2 to have a spread, got {samples}")
    with torch.no_grad(), evaluating(bayes):
        outputs = bayes.outputs(x, samples=samples)
    outputs = outputs.double() if outputs.device.type != "mps" else outputs.float()
    deviation = outputs.var(0, unbiased=True).mean().sqrt()
    scale = outputs.square().mean().sqrt()
    return float(deviation / scale) if float(scale) > 0 else float(deviation)


def findings(
    now: Mapping[str, WeightSpread],
    before: Mapping[str, WeightSpread] | None = None,
    predictions: float | None = None,
) -> list[str]:
    """What is wrong with a posterior's spread, in words; empty if nothing is.

    Args:
        now: `spread(bayes)` after training.
        before: `spread(bayes)` before it, to see a collapse.
        predictions: `prediction_spread` on some data.
    """
    said: list[str] = []
    if not now:
        return said
    flat = [s.name for s in now.values() if s.sd <= NO_SPREAD * max(s.scale if s.scale > 0 else 0.0, 1e-30)]
    if flat:
        said.append(
            f"no spread: the posterior standard deviation is zero beside the weights in {_names(tuple(flat))}; these "
            "weights are deterministic in all but name (raise the family's initial spread, or name them Point)"
        )
    fallen = {
        name: now[name].sd / before[name].sd
        for name in now
        if before is not None and name in before and name not in flat
        and before[name].sd > 0 and now[name].sd < COLLAPSED * before[name].sd
    }  # fmt: skip
    if fallen:
        worst = min(fallen, key=lambda name: fallen[name])
        said.append(
            f"collapsed spread: in {_names(tuple(fallen))} the posterior standard deviation fell below {COLLAPSED:.0%} "
            f"of its start (lowest {worst!r}, to {fallen[worst]:.2g} of it): the objective leaves nothing that holds "
            "it up (objective='elbo', or a larger beta, or a family that is not diagonal)"
        )
    if predictions is not None and predictions < IDENTICAL:
        said.append(
            f"identical predictions: outputs vary over draws by {predictions:.1e} of their own scale, so the "
            "uncertainty reported will be that of a deterministic network"
        )
    ratios = [s.snr for s in now.values() if not math.isnan(s.snr)]
    if ratios and max(ratios) < SWAMPED:
        said.append(
            f"noise: the median |mean| / sd is at most {max(ratios):.2g} in every random parameter; the prior has "
            "swamped the data (warm the KL up, lower beta, or use a prior scaled with fan-in)"
        )
    return said


def family_name(posterior: type[nn.Module]) -> str:
    """The name of the family that makes a class of posteriors: `MeanField` of `MeanFieldPosterior`."""
    return posterior.__name__.removesuffix("Posterior")


def _spread_of(
    name: str, family: type[nn.Module], variance: Tensor, mean: Tensor | None, diagonal: bool
) -> WeightSpread:
    sd = variance.detach().clamp_min(0).sqrt().float()
    scale = snr = float("nan")
    if mean is not None:
        mean = mean.detach().float()
        scale = float(mean.square().mean().sqrt())
        # 0 / 0 counts as no signal
        ratio = torch.where(mean == 0, torch.zeros_like(mean), mean.abs() / sd)
        snr = float(ratio.median()) if ratio.numel() else float("nan")
    return WeightSpread(
        name=name,
        family=family_name(family),
        numel=sd.numel(),
        sd=float(sd.square().mean().sqrt()),
        scale=scale,
        snr=snr,
        diagonal=diagonal,
    )


def _row(posterior: WeightPosterior, spreads: Mapping[str, WeightSpread], kl: float | None) -> SummaryRow:
    names = tuple(slot.name for slot in posterior.slots)
    own = {id(slot.parameter) for slot in posterior.slots} if not posterior.takes_over else set()
    stored = [p for p in posterior.parameters() if id(p) not in own]
    numel = sum(spreads[name].numel for name in names)
    size = stored[0].element_size() if stored else 0
    removed = numel if posterior.takes_over else 0
    weights = [spreads[name] for name in names]
    return SummaryRow(
        parameters=names,
        family=family_name(type(posterior)),
        numel=numel,
        added=sum(p.numel() for p in stored) - removed,
        added_bytes=sum(p.numel() * p.element_size() for p in stored) - removed * size,
        kl=kl,
        sd=math.sqrt(sum(w.sd**2 * w.numel for w in weights) / max(numel, 1)),
        snr=statistics.median(w.snr for w in weights),
    )


def _kls(bayes: BayesianModule) -> dict[int, float | None]:
    """KL of each posterior by its identity; of a joint prior with its first member, 0 with the others."""
    found: dict[int, float | None] = {}
    for posterior in bayes.posteriors():
        if posterior.joint_prior:
            found[id(posterior)] = 0.0
            continue
        try:
            values = posterior.kl(generator=_generator(bayes)).values()
            found[id(posterior)] = math.fsum(float(value) for value in values)
        except CapabilityError:
            found[id(posterior)] = None
    for prior in bayes.joint_priors:
        members = [p for p in bayes.posteriors() if any(own is prior for own in p.joint_prior)]
        assert isinstance(prior, WeightPrior)
        try:
            found[id(members[0])] = float(joint_kl(prior, members, "auto", 1, _generator(bayes)))
        except CapabilityError:
            found[id(members[0])] = None
    return found


def _generator(bayes: BayesianModule) -> torch.Generator:
    parameter = next(bayes.parameters())
    return torch.Generator(device=parameter.device).manual_seed(0)


def _nats(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
