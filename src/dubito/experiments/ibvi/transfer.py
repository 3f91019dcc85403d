"""Does the best learning rate transfer between widths? (Tensor Programs V, for variational weights.)

A multilayer perceptron with random first and last layer, trained by its expected loss at each width and learning rate,
under the standard and under the maximal update parametrisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito import mup
from dubito.conversion import bayesianize
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.likelihoods import Categorical
from dubito.plots import COLOURS, INK, blank_figure, inked
from dubito.report import Picture, Row, Table
from dubito.weights import Family, LowRankCovariance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS, CLASSES, RANK = 20, 4, 4
PARAMETRIZATIONS: tuple[mup.Parametrization, ...] = ("standard", "mup")
_HOPELESS = 1e3  # nats: a loss above it does not come back


@dataclass(frozen=True)
class TransferSettings:
    """How the figure is made.

    Attributes:
        widths: of the two hidden layers.
        exponents: learning rates are 2 to these.
        steps: of SGD with momentum 0.9, batches of 128, one draw a step.
        points: training data.
        seeds: whose final losses are averaged.
    """

    widths: tuple[int, ...] = (32, 128, 512, 1024)
    exponents: tuple[int, ...] = (-9, -8, -7, -6, -5, -4, -3, -2)
    steps: int = 150
    points: int = 1024
    seeds: tuple[int, ...] = (0,)


FULL = TransferSettings((32, 64, 128, 256, 512, 1024), tuple(range(-11, 1)), 250, seeds=(0, 1, 2))

#: Final expected loss by parametrisation, width and exponent of the learning rate (infinite: diverged).
Losses = dict[str, dict[int, dict[int, float]]]


def final_loss(
    width: int, parametrization: mup.Parametrization, lr: float, seed: int, s: TransferSettings
) -> float:
    """Expected loss on the training data after training, in nats (16 draws); infinity where it diverged."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )
        families: dict[str | type[nn.Module], Family] = {
            "0": LowRankCovariance(RANK),
            "4": LowRankCovariance(RANK),
        }
        bayes = bayesianize(network, families, likelihood=Categorical())
        mup.initialize_(bayes, parametrization)
        optimizer = torch.optim.SGD(
            mup.parameter_groups(bayes, lr, parametrization=parametrization), momentum=0.9
        )
        x, y = data(s.points)
        order = torch.Generator().manual_seed(seed)
        for _ in range(s.steps):
            index = torch.randint(s.points, (128,), generator=order)
            loss = nn.functional.cross_entropy(bayes(x[index]), y[index])
            if not float(loss.detach()) < _HOPELESS:  # NaN too
                return math.inf
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return _expected_loss(bayes, x, y)


def data(points: int) -> tuple[Tensor, Tensor]:
    """Gaussian inputs, labelled by the largest output of a random two-layer network."""
    generator = torch.Generator().manual_seed(12345)
    x = torch.randn(points, INPUTS, generator=generator)
    hidden = (x @ torch.randn(INPUTS, 32, generator=generator)).relu()
    return x, (hidden @ torch.randn(32, CLASSES, generator=generator)).argmax(1)


def _expected_loss(bayes: Any, x: Tensor, y: Tensor) -> float:
    draws = bayes.draw(16, torch.Generator().manual_seed(0))
    with torch.no_grad():
        value = float(bayes.nll(bayes.outputs(x, draws=draws), y))
    return value if math.isfinite(value) else math.inf


def transfer(settings: TransferSettings, say: Callable[[str], None] = lambda text: None) -> Losses:
    """Train at every width and learning rate under both parametrisations."""
    losses: Losses = {}
    for name in PARAMETRIZATIONS:
        losses[name] = {}
        for width in settings.widths:
            losses[name][width] = {
                e: sum(final_loss(width, name, 2.0**e, seed, settings) for seed in settings.seeds)
                / len(settings.seeds)
                for e in settings.exponents
            }
            best = best_exponent(losses[name][width])
            say(
                f"    {name}, width {width}: best learning rate 2^{best}, loss {losses[name][width][best]:.3f}"
            )
    return losses


def best_exponent(row: dict[int, float]) -> int:
    """The exponent of the least loss (the smallest of several)."""
    return min(row, key=lambda e: (row[e], e))


def drift(losses: dict[int, dict[int, float]]) -> int:
    """How far the best learning rate of the widest is from that of the narrowest, in powers of two."""
    widths = sorted(losses)
    return best_exponent(losses[widths[-1]]) - best_exponent(losses[widths[0]])


def spread(losses: dict[int, dict[int, float]], least: int) -> int:
    """Range of the best exponents over widths of at least `least`."""
    best = [best_exponent(row) for width, row in losses.items() if width >= least]
    return max(best) - min(best)


def transfer_figure(losses: Losses) -> Figure:
    """Final loss against the learning rate, one line a width, one panel a parametrisation."""
    figure = blank_figure(3.2, 7.2)
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    titles = {"standard": "standard parametrisation", "mup": "maximal update parametrisation"}
    for axes, (name, by_width) in zip(panels, losses.items(), strict=True):
        for index, (width, row) in enumerate(by_width.items()):
            points = [(2.0**e, v) for e, v in row.items() if math.isfinite(v)]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker=".", linewidth=1.2, label=str(width))
            best = best_exponent(row)
            axes.plot(2.0**best, row[best], "o", color=colour, markersize=7, markerfacecolor="none")
        axes.set_xscale("log", base=2)
        axes.set_title(titles.get(name, name), fontsize=10)
        axes.set_xlabel("learning rate")
        axes.set_ylim(0, 1.6)
    panels[0].set_ylabel("expected loss (nats)")
    box = panels[0].legend(title="width", frameon=False, fontsize=7, title_fontsize=8, labelcolor=INK)
    box.get_title().set_color(INK)
    return inked(figure)


def transfer_table(losses: Losses, widths: Sequence[int]) -> Table:
    """Best learning rate and its loss by width."""
    rows = []
    for name, by_width in losses.items():
        best = {w: best_exponent(by_width[w]) for w in widths}
        rows.append(Row(f"{name}: best learning rate", tuple(f"2^{best[w]}" for w in widths)))
        rows.append(Row(f"{name}: its loss", tuple(f"{by_width[w][best[w]]:.3f}" for w in widths)))
    return Table(tuple(map(str, widths)), tuple(rows), "Best learning rate by width")


def mup_part(job: PartJob) -> Outcome:
    """The part `mup` of the reproduction."""
    settings = FULL if job.full else TransferSettings(seeds=job.seeds)
    losses = transfer(settings, job.say)
    alt = (
        "Final loss against learning rate for each width; the optimum moves left with width under the standard \
parametrisation and stays under the maximal update one."
    )
    targets = {
        "under the standard parametrisation the best learning rate falls with width, by at least a factor of four": (
            drift(losses["standard"]) <= -2
        ),
        "under muP it stays within a factor of two over all widths": spread(losses["mup"], 0) <= 1,
    }
    return Outcome(
        "Hyperparameter transfer",
        (
            f"A perceptron with two hidden layers and rank-{RANK} covariances in the first and the last layer, trained "
            f"for {settings.steps} steps of SGD (momentum 0.9, batch 128, one draw each) on {settings.points} points.",
        ),
        (transfer_table(losses, settings.widths),),
        (Picture(transfer_figure(losses), alt, "Learning-rate transfer"),),
        {
            name: {
                str(w): {f"2^{e}": v if math.isfinite(v) else None for e, v in row.items()}
                for w, row in part.items()
            }
            for name, part in losses.items()
        },
        targets,
    )
