"""The one-dimensional regression of Blundell et al. (2015, section 5.2): uncertainty where there are no data.

`y = x + 0.3 sin(2π(x + e)) + 0.3 sin(4π(x + e)) + e` with `e ~ N(0, 0.02²)`, inputs in [0, 0.5]. The paper does not say
how the noise, the network and the prior were chosen; 0.02 is read as a standard deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.likelihoods import Gaussian
from dubito.objectives import negative_elbo
from dubito.optim.parameter_groups import parameter_groups
from dubito.priors import FanIn
from dubito.weights import MeanField

DATA_RANGE = (0.0, 0.5)
SHOWN_RANGE = (-0.4, 1.2)
MARGIN = 0.2  # inputs further than this from all data are "off the data"
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class CurveSettings:
    """How the curve is fitted.

    Attributes:
        points: number of training pairs.
        hidden: ReLU units of each of the two layers.
        steps: full-batch Adam steps.
        lr: highest learning rate; it falls along a cosine to a hundredth.
        prior: standard deviation of the Gaussian prior of every weight, in units of the fan-in scale.
        scale: initial posterior deviation as a fraction of the fan-in scale.
        draws: of the weights in the predictive.
    """

    points: int = 1000
    hidden: int = 50
    steps: int = 3000
    lr: float = 1e-2
    prior: float = 8.0
    scale: float = 0.1
    draws: int = 200

    def __post_init__(self) -> None:
        for name in ("points", "hidden", "steps", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


@dataclass(frozen=True)
class Curve:
    """The fitted curve.

    Attributes:
        x, y: training data, shape ``(N,)``.
        grid: inputs shown, shape ``(G,)``.
        quantiles: of the predictive (noise included) at `LEVELS`, shape ``(5, G)``.
        epistemic_sd: standard deviation of the mean over draws, shape ``(G,)``.
        plain: the same network without random weights, shape ``(G,)``.
        noise: standard deviation of the noise as learned.
    """

    x: Tensor
    y: Tensor
    grid: Tensor
    quantiles: Tensor
    epistemic_sd: Tensor
    plain: Tensor
    noise: float

    @property
    def on_data(self) -> Tensor:
        """Which inputs of the grid lie among the data."""
        return (self.grid >= DATA_RANGE[0]) & (self.grid <= DATA_RANGE[1])

    @property
    def off_data(self) -> Tensor:
        """Which lie further than `MARGIN` from them."""
        return (self.grid < DATA_RANGE[0] - MARGIN) | (self.grid > DATA_RANGE[1] + MARGIN)

    def values(self) -> dict[str, float]:
        """Mean widths of the bands on and off the data, and their ratios."""
        half = self.quantiles[3] - self.quantiles[1]
        wide = self.quantiles[4] - self.quantiles[0]
        result = {"noise_sd": self.noise}
        for name, width in (
            ("interquartile", half),
            ("central_90", wide),
            ("epistemic_sd", self.epistemic_sd),
        ):
            on, off = float(width[self.on_data].mean()), float(width[self.off_data].mean())
            result |= {f"{name}_on_data": on, f"{name}_off_data": off, f"{name}_ratio": off / on}
        return result


def curve_data(points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Training pairs of the paper's function, shapes ``(N, 1)``."""
    low, high = DATA_RANGE
    x = low + (high - low) * torch.rand(points, 1, generator=generator)
    e = 0.02 * torch.randn(points, 1, generator=generator)
    turn = 2 * math.pi * (x + e)
    return x, x + 0.3 * torch.sin(turn) + 0.3 * torch.sin(2 * turn) + e


def fit_curve(settings: CurveSettings, seed: int = 0) -> Curve:
    """Fit the network with random weights, and without, and predict over `SHOWN_RANGE`."""
    generator = torch.Generator().manual_seed(seed)
    x, y = curve_data(settings.points, generator)
    grid = torch.linspace(*SHOWN_RANGE, 321)[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = _network(settings.hidden)
        family = MeanField(prior=FanIn(settings.prior), scale=settings.scale)
        noisy = Gaussian(noise=0.1, learned=True)
        bayes = bayesianize(_network(settings.hidden), family, likelihood=noisy)
        _train(bayes, x, y, settings)
        _train(plain, x, y, settings)
    predictive = bayes.predict(grid, samples=settings.draws, generator=generator)
    with torch.no_grad():
        line = plain(grid).squeeze(-1)
    return Curve(
        x=x.squeeze(-1),
        y=y.squeeze(-1),
        grid=grid.squeeze(-1),
        quantiles=predictive.quantile(LEVELS).squeeze(-1),
        epistemic_sd=predictive.epistemic.sqrt().squeeze(-1),
        plain=line,
        noise=float(noisy.noise.detach()),
    )


def _network(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def _train(model: nn.Module, x: Tensor, y: Tensor, settings: CurveSettings) -> None:
    """Full-batch Adam on the negative ELBO, or on the squared error of a plain network."""
    groups = (
        parameter_groups(model, settings.lr, 0.0) if isinstance(model, BayesianModule) else model.parameters()
    )
    optimizer = torch.optim.Adam(groups, lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps, settings.lr / 100)
    model.train()
    for _ in range(settings.steps):
        if isinstance(model, BayesianModule):
            loss = negative_elbo(model.nll(model(x), y), model.kl(), len(x)).loss
        else:
            loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
