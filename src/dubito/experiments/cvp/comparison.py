"""Measuring: one part and seed after the other; posterior and rows are on the disk as soon as they are known."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.bayesian import BayesianModule
from dubito.experiments.cvp.contestants import CONTESTANTS, Bench, Budget
from dubito.experiments.cvp.costs import costs
from dubito.experiments.cvp.exam import judge
from dubito.experiments.cvp.material import Material, Sizes, load_material
from dubito.experiments.cvp.networks import NETWORKS
from dubito.experiments.cvp.training import Recipe, at_spread, drawn_logits, save_whole, train
from dubito.experiments.evaluation import Stopwatch
from dubito.experiments.ibvi.comparison import Rows
from dubito.experiments.ibvi.processes import in_processes
from dubito.from_gaussian import from_variances
from dubito.likelihoods import Categorical
from dubito.metrics import negative_log_likelihood
from dubito.moments.logit_covariance import LogitCovariance
from dubito.moments.propagate import gaussian_weights

SPREADS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)  #: factors on the posterior's standard deviations that are tried
TRYING = 16  # draws of each
COSTS, COST_SEED = "costs", 0  # a row of its own, measured on this seed's network
Values = dict[str, Any]
Piece = tuple[Values, Values]

#: By part; chosen on validation examples of a seed that is not reported.
RECIPES: Mapping[str, Recipe] = {
    "resnet": Recipe(warm=8, warm_lr=5e-3, epochs=4),
    "vit": Recipe(warm=8, warm_lr=3e-3, epochs=4),
    "bert": Recipe(warm=4, epochs=3),
    "pairs": Recipe(warm=8, epochs=4),
}


@dataclass(frozen=True)
class CvpSettings:
    """The size of a comparison.

    Attributes:
        sizes: numbers of examples.
        recipes: by part.
        budget: draws and steps.
        methods: names in `CONTESTANTS`.
        compile_too: also measure the cost of compiled propagations.
    """

    sizes: Sizes = field(default_factory=Sizes)
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: dict(RECIPES))
    budget: Budget = field(default_factory=Budget)
    methods: tuple[str, ...] = tuple(CONTESTANTS)
    compile_too: bool = True

    def rows_of(self, seed: int) -> tuple[str, ...]:
        """Methods, and where they are measured, costs."""
        return (*self.methods, COSTS) if seed == COST_SEED else self.methods

    def key(self, part: str, method: str, seed: int) -> Values:
        """What a row depends on."""
        return {**self.trained(part, seed), "method": method, "budget": dataclasses.asdict(self.budget)}

    def trained(self, part: str, seed: int) -> Values:
        """What a posterior depends on."""
        return {
            "data": part,
            "network": part,
            "seed": seed,
            "sizes": dataclasses.asdict(self.sizes),
            "recipe": dataclasses.asdict(self.recipes[part]),
        }


def _larger(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, warm=2 * recipe.warm, epochs=5 * recipe.epochs)


FULL = CvpSettings(
    sizes=Sizes(None, 2_000, None, 2_000),
    recipes={part: _larger(recipe) for part, recipe in RECIPES.items()},
    budget=Budget(matching=200, nll_steps=120, nll_lr=0.05),
)


@dataclass(frozen=True)
class Job:
    """Rows of one part and seed; they share the posterior."""

    settings: CvpSettings
    part: str
    seed: int
    methods: tuple[str, ...]
    folder: Path | None


def measure(
    parts: Sequence[str],
    settings: CvpSettings,
    seeds: Sequence[int],
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    processes: int = 1,
) -> list[Values]:
    """Train, fit and judge everything; rows by part, then seed, then method.

    Rows are the same however many processes measure them, but for seconds and costs.

    Args:
        parts: names in `NETWORKS`.
        settings: the size.
        seeds: everything is repeated for each.
        folder: of posteriors and finished rows, which are taken up again; None keeps nothing.
        say: called with lines of progress.
        processes: how many parts and seeds at once, each in a process of its own; 1 stays in this one.

    Raises:
        FileNotFoundError: if the data are not there.
        WorkerDiedError: if one of several processes was killed.
    """
    kept = {part: Rows(folder / f"{part}.json" if folder is not None else None) for part in parts}
    jobs = []
    for part in parts:
        for seed in seeds:
            wanted = settings.rows_of(seed)
            found = [m for m in wanted if kept[part].find(settings.key(part, m, seed)) is None]
            if found:
                jobs.append(Job(settings, part, seed, tuple(found), folder))
    with contextlib.closing(_pieces(jobs, processes)) as pieces:
        for key, values in pieces:
            say(line(kept[key["data"]].add(key, values)))
    rows = (kept[p].find(settings.key(p, m, s)) for p in parts for s in seeds for m in settings.rows_of(s))
    return [row for row in rows if row is not None]


def _pieces(jobs: Sequence[Job], processes: int) -> Generator[Piece, None, None]:
    if processes > 1 and len(jobs) > 1:
        yield from in_processes(measured, jobs, processes, torch.get_num_threads())
        return
    for job in jobs:
        yield from measured(job)


def measured(job: Job) -> Iterator[Piece]:
    """Keys of rows with their values, as they are known."""
    settings = job.settings
    material = load_material(job.part, settings.sizes, job.seed)
    posterior = _posterior(job, material)
    kept = job.folder / f"{job.part}-{job.seed}-moments.pt" if job.folder is not None else None
    key = {**settings.trained(job.part, job.seed), "draws": settings.budget.draws}
    bench = Bench(posterior.bayes, material, job.seed, settings.budget, kept, key)
    shared = {"train_seconds": posterior.seconds, "spread": posterior.spread, "tried": dict(posterior.tried)}
    for method in job.methods:
        watch = Stopwatch()
        if method == COSTS:
            values: Values = {"metrics": {}, "costs": _costs(bench, settings)}
        else:
            values = judge(CONTESTANTS[method].answer(bench), bench)
        seconds = watch.seconds(material.test[0].device)
        yield settings.key(job.part, method, job.seed), {**values, **shared, "seconds": seconds}


def _costs(bench: Bench, settings: CvpSettings) -> dict[str, float]:
    """On the validation inputs, with a covariance of the shape that ours has (its numbers do not matter)."""
    x, y = bench.material.validation
    covariance = LogitCovariance.fit(bench.bayes, [(x[:64], y[:64])], draws=4, with_labels=False)
    return costs(bench.bayes, x, covariance, compile_too=settings.compile_too)


# ------------------------------------------------------------------------------------------------ posteriors


@dataclass(frozen=True)
class Posterior:
    """A trained network at the spread chosen, what was tried, and the seconds of training."""

    bayes: BayesianModule
    spread: float
    tried: Mapping[str, float]
    seconds: float


def _posterior(job: Job, material: Material) -> Posterior:
    """Trained, or read from the folder where the same settings have left it."""
    path = job.folder / f"{job.part}-{job.seed}.pt" if job.folder is not None else None
    wanted = job.settings.trained(job.part, job.seed)
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        network = NETWORKS[job.part](material.vocabulary, material.length)
        if path is not None and path.is_file():
            kept = torch.load(path, weights_only=True)
            if kept["key"] == wanted:
                return _restored(network, kept)
        watch = Stopwatch()
        bayes = train(network, material.train, job.settings.recipes[job.part], job.seed)
        seconds = watch.seconds(material.train[0].device)
    spread, tried = chosen_spread(bayes, material, job.seed)
    result = Posterior(at_spread(bayes, spread), spread, tried, seconds)
    if path is not None:
        _keep(path, wanted, result)
    return result


def chosen_spread(bayes: BayesianModule, material: Material, seed: int) -> tuple[float, dict[str, float]]:
    """The factor on the standard deviations with the least NLL of `TRYING` draws on the validation examples."""
    x, y = material.validation
    tried = {}
    for factor in SPREADS:
        (logits,) = drawn_logits(at_spread(bayes, factor), (x,), TRYING, 30_000 + seed)
        probs = logits.double().softmax(-1).mean(0)
        tried[str(factor)] = float(negative_log_likelihood(probs, y))
    with torch.no_grad():
        tried["0"] = float(negative_log_likelihood(bayes(x).double().softmax(-1), y))  # the mean network
    best = min(SPREADS, key=lambda factor: tried[str(factor)])
    return best, tried


def _keep(path: Path, key: Values, posterior: Posterior) -> None:
    weights = gaussian_weights(posterior.bayes)
    values = {
        "key": key,
        "means": {name: m.mean.detach().clone() for name, m in weights.items()},
        "variances": {name: m.variance.detach().clone() for name, m in weights.items()},
        "spread": posterior.spread,
        "tried": dict(posterior.tried),
        "seconds": posterior.seconds,
    }
    save_whole(path, values)


def _restored(network: nn.Module, kept: Mapping[str, Any]) -> Posterior:
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(kept["means"][name])
    bayes = from_variances(network.eval(), kept["variances"], Categorical()).eval()
    return Posterior(bayes, kept["spread"], kept["tried"], kept["seconds"])


def line(row: Values) -> str:
    """A row in words, for progress."""
    key, metrics = row["key"], row["metrics"]
    shown = ", ".join(f"{n} {v:.3g}" for n, v in (metrics or row.get(COSTS, {})).items())
    return f"    {key['data']}, seed {key['seed']}, {key['method']} ({row['seconds']:.0f} s): {shown}"
