"""The two toy figures: regression on three clusters, and two moons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito import mup
from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.likelihoods import Bernoulli, Gaussian
from dubito.plots import COLOURS, INK, blank_figure, inked, legend
from dubito.report import Picture, Row, Table
from dubito.weights import Family, LowRankCovariance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANK = 16  # of either layer's covariance, or less where the layer is smaller
SHARPNESS = (
    4.0  # inputs are multiplied by it, so that hidden units change between the clusters, not over them all
)


@dataclass(frozen=True)
class ToySettings:
    """Sizes of both toys; `epochs` is for each, `draws` for the predictions."""

    epochs: int = 600
    draws: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Clusters:
    """The regression: training data and the predictive on a grid (mean and standard deviation of the function)."""

    x: Tensor
    y: Tensor
    grid: Tensor
    mean: Tensor
    sd: Tensor
    prior_sd: Tensor

    def ratio(self) -> float:
        """Median standard deviation between and beyond the clusters, over that within them."""
        return float(self.sd[self._where(False)].median() / self.sd[self._where(True)].median())

    def shrinkage(self, near: bool) -> float:
        """Median standard deviation on the data (or off them) over that of the prior there."""
        where = self._where(near)
        return float(self.sd[where].median() / self.prior_sd[where].median())

    def _where(self, near: bool) -> Tensor:
        distance = (self.grid[:, None] - self.x[None]).abs().min(1).values
        return distance < 0.02 if near else distance > 0.15


@dataclass(frozen=True)
class Moons:
    """The classification: training data, and P(class 1) and its epistemic part on a square grid."""

    x: Tensor
    y: Tensor
    grid: Tensor
    probs: Tensor
    epistemic: Tensor
    accuracy: float

    def ratio(self) -> float:
        """Mean epistemic uncertainty far from the data over that near them."""
        distance = torch.cdist(self.grid, self.x).min(1).values
        return float(self.epistemic[distance > 0.75].mean() / self.epistemic[distance < 0.1].mean())


def cluster_data(seed: int) -> tuple[Tensor, Tensor]:
    """Three separated clusters of sigmoid(10 x) - 1/2 with noise of 0.02."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([-0.7, 0.0, 0.7]).repeat_interleave(20)
    x = centres + 0.08 * (2 * torch.rand(60, generator=generator) - 1)
    y = torch.sigmoid(10 * x) - 0.5 + 0.02 * torch.randn(60, generator=generator)
    return x, y


def moon_data(seed: int, points: int = 200, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Two interleaved half circles."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.linspace(0, math.pi, points // 2)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    x = torch.cat([upper, lower]) + noise * torch.randn(2 * (points // 2), 2, generator=generator)
    return x, torch.arange(2).repeat_interleave(points // 2)


def clusters(settings: ToySettings) -> Clusters:
    """Fit the three clusters: 3 layers of 64 SiLU units, covariances in the first and the last layer."""
    x, y = cluster_data(settings.seed)
    grid = torch.linspace(-1.5, 1.5, 301)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        bayes = _network(1, 64, Gaussian(noise=0.02))
        before = _spread(bayes, grid, settings)[1]
        loss: Callable[[Tensor, Tensor], Tensor] = lambda out, t: (out.squeeze(-1) - t).square().mean()  # noqa: E731
        _train(bayes, loss, SHARPNESS * x[:, None], y, 0.005, settings.epochs, 20)
        mean, sd = _spread(bayes, grid, settings)
    return Clusters(x, y, grid, mean, sd, before)


def moons(settings: ToySettings) -> Moons:
    """Fit two moons: 3 layers of 64 SiLU units, covariances in the first and the last layer."""
    x, y = moon_data(settings.seed)
    axis = torch.linspace(-1.0, 1.0, 81)
    grid = torch.cartesian_prod(1.25 + 2.5 * axis, 0.25 + 2.0 * axis) - torch.tensor([0.75, 0.0])
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        bayes = _network(2, 64, Bernoulli())
        loss: Callable[[Tensor, Tensor], Tensor] = (  # noqa: E731
            lambda out, t: nn.functional.binary_cross_entropy_with_logits(out.squeeze(-1), t.float())
        )
        _train(bayes, loss, SHARPNESS * x, y, 0.005, max(1, settings.epochs * 2 // 5), 32)
    generator = torch.Generator().manual_seed(settings.seed)
    draws = bayes.draw(settings.draws, generator)
    predictive = bayes.predict(SHARPNESS * grid, draws=draws, keep_draws=False)
    at_data = bayes.predict(SHARPNESS * x, draws=draws, keep_draws=False)
    accuracy = float(((at_data.probs.reshape(-1) > 0.5).long() == y).double().mean())
    return Moons(
        x, y, grid, predictive.probs.reshape(-1), predictive.mutual_information.reshape(-1), accuracy
    )


def _network(inputs: int, width: int, likelihood: Any) -> BayesianModule:
    layers: list[nn.Module] = []
    for size in (inputs, width, width):
        layers += [nn.Linear(size, width), nn.SiLU()]
    families: dict[str | type[nn.Module], Family] = {
        "0": LowRankCovariance(RANK),
        "6": LowRankCovariance(RANK),
    }
    bayes: BayesianModule = bayesianize(
        nn.Sequential(*layers, nn.Linear(width, 1)), families, likelihood=likelihood
    )
    mup.initialize_(bayes)
    return bayes


def _train(
    bayes: BayesianModule,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    lr: float,
    epochs: int,
    batch: int,
) -> None:
    optimizer = torch.optim.SGD(mup.parameter_groups(bayes, lr), momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss(bayes(x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()


def _spread(bayes: BayesianModule, grid: Tensor, settings: ToySettings) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the function over draws, without noise."""
    draws = bayes.draw(settings.draws, torch.Generator().manual_seed(settings.seed))
    with torch.no_grad():
        outputs = bayes.outputs(SHARPNESS * grid[:, None], draws=draws).squeeze(-1)
    return outputs.mean(0), outputs.std(0)


def clusters_figure(found: Clusters) -> Figure:
    """Data, mean and two standard deviations, after training."""
    figure = blank_figure(3.0, 5.0)
    axes = figure.subplots()
    grid, mean, sd = found.grid.numpy(), found.mean.numpy(), found.sd.numpy()
    axes.fill_between(grid, mean - 2 * sd, mean + 2 * sd, color=COLOURS[0], alpha=0.25, label="± 2 sd")
    axes.plot(grid, mean, color=COLOURS[0], label="mean")
    axes.plot(found.x.numpy(), found.y.numpy(), ".", color=INK, markersize=4, label="data")
    axes.set_ylim(-1.2, 1.2)
    legend(axes)
    return inked(figure)


def moons_figure(found: Moons) -> Figure:
    """P(class 1), and the epistemic part of its uncertainty, over the plane."""
    figure = blank_figure(2.9, 7.2)
    side = math.isqrt(len(found.grid))
    shape = (side, side)
    columns = [found.grid[:, i].reshape(shape).numpy() for i in range(2)]
    for axes, values, title in zip(
        figure.subplots(1, 2),
        (found.probs, found.epistemic),
        ("P(orange)", "epistemic uncertainty (nats)"),
        strict=True,
    ):
        image = axes.pcolormesh(*columns, values.reshape(shape).numpy(), cmap="cividis", shading="auto")
        figure.colorbar(image, ax=axes, shrink=0.85)
        for label in (0, 1):
            points, look = found.x[found.y == label].numpy(), {"markersize": 5, "markeredgewidth": 0.4}
            axes.plot(points[:, 0], points[:, 1], ".", color=COLOURS[label], markeredgecolor="white", **look)
        axes.set_title(title, fontsize=10)
    return inked(figure)


def toys_part(job: PartJob) -> Outcome:
    """The part `toys` of the reproduction."""
    settings = ToySettings(draws=2048 if job.full else 256, seed=job.seeds[0])
    regression, plane = clusters(settings), moons(settings)
    rows = (
        Row("three clusters: sd off the data / on the data", (f"{regression.ratio():.1f}",)),
        Row("three clusters: sd on the data / prior", (f"{regression.shrinkage(True):.3f}",)),
        Row("three clusters: sd off the data / prior", (f"{regression.shrinkage(False):.3f}",)),
        Row("three clusters: rms error on the data", (f"{_error(regression):.3f}",)),
        Row("two moons: training accuracy", (f"{plane.accuracy:.3f}",)),
        Row("two moons: epistemic uncertainty off / on the data", (f"{plane.ratio():.1f}",)),
    )
    return Outcome(
        "Two toys",
        (
            "Trained by the expected loss alone from muP's prior, with covariances of rank 16 in the first and the "
            "last of four layers. How far the spread goes on the data, and how much of it is left elsewhere:",
        ),
        (Table(("measured",), rows),),
        (
            Picture(
                clusters_figure(regression),
                "A narrow band at three clusters, wide elsewhere.",
                "Three clusters",
            ),
            Picture(moons_figure(plane), "Two moons: uncertainty grows away from the points.", "Two moons"),
        ),
        {
            "clusters_sd_ratio": regression.ratio(),
            "clusters_rmse": _error(regression),
            "moons_accuracy": plane.accuracy,
            "moons_epistemic_ratio": plane.ratio(),
        },
        {
            "three clusters: the spread on the data falls to a tenth of the prior's, and less off them": (
                float(regression.shrinkage(near=True)) <= 0.1
                and regression.shrinkage(near=False) > regression.shrinkage(near=True)
            ),
            "two moons: told apart, and less certain off the data than on them": (
                plane.accuracy >= 0.97 and plane.ratio() > 1
            ),
        },
    )


def _error(found: Clusters) -> float:
    nearest = (found.x[:, None] - found.grid[None]).abs().argmin(1)
    return float((found.mean[nearest] - found.y).square().mean().sqrt())
