"""The comparison: two data sets, two networks, nine methods; every row is on the disk as soon as it is known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito.data import load_dataset
from dubito.experiments.evaluation import Stopwatch
from dubito.experiments.ibvi.contestants import CONTESTANTS, NETWORKS, Architecture, Task, device_of
from dubito.experiments.ibvi.exam import Material, Sizes, judge
from dubito.experiments.ibvi.processes import in_processes
from dubito.experiments.ibvi.training import BATCH, groups, loss_of, sgd, with_low_rank
from dubito.posthoc.laplace import MissingLaplaceError
from dubito.report import write_whole

OTHER = {"mnist": "fashion-mnist", "fashion-mnist": "mnist"}
COSTS = {"lenet5": 1, "resnet": 2}  # of an epoch, relative: what takes longest is begun first
#: Methods that do not start from the plain network, and the recipe each takes in its place.
_OWN = {"ibvi": "ibvi", "ibvi-last-two": "ibvi_last_two", "weight-space": "mean_field"}
Values = dict[str, Any]
Report = tuple[Values, Values | str]  # a row's key with its values, or with the reason why it is left out


@dataclass(frozen=True)
class ComparisonSettings:
    """The size of a comparison; the default is minutes, `FULL` is the paper's protocol.

    Attributes:
        data: names of the data sets.
        networks: names in `NETWORKS`.
        methods: names in `CONTESTANTS`.
        epochs: by network, passes over the training images.
        samples: draws of the weights in a prediction.
        sizes: numbers of images.
        seeds: everything is repeated for each.
    """

    data: tuple[str, ...] = ("mnist", "fashion-mnist")
    networks: tuple[str, ...] = ("lenet5", "resnet")
    methods: tuple[str, ...] = tuple(CONTESTANTS)
    epochs: Mapping[str, int] = field(default_factory=lambda: {"lenet5": 30, "resnet": 20})
    samples: int = 16
    sizes: Sizes = field(default_factory=Sizes)
    seeds: tuple[int, ...] = (0,)


FULL = ComparisonSettings(
    epochs={"lenet5": 200, "resnet": 200}, samples=32, sizes=Sizes(None, None, None, None, None)
)


class Rows:
    """Finished rows, one a data set, network, method and seed, kept in a JSON file where a folder is given.

    A row found there is taken over if what it depends on is the same; anything else is measured anew.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Values] = []
        if path is not None and path.is_file():
            self.rows = json.loads(path.read_text(encoding="utf-8"))

    def find(self, key: Values) -> Values | None:
        """The row of that key, or None."""
        plain = json.loads(json.dumps(key))
        return next((row for row in self.rows if row["key"] == plain), None)

    def add(self, key: Values, values: Values) -> Values:
        """Keep a row, in place of an older one of the same data set, network, method and seed."""
        row = json.loads(json.dumps({"key": key, **values}))
        same = ("data", "network", "method", "seed")
        self.rows = [r for r in self.rows if any(r["key"][n] != row["key"][n] for n in same)] + [row]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.rows, indent=1) + "\n")
        return dict(row)


@dataclass(frozen=True)
class Job:
    """Rows of one network on one data set that one process measures, one after the other.

    Methods that start from the plain network share it, so they belong together.
    """

    settings: ComparisonSettings
    data: str
    network: str
    seed: int
    methods: tuple[str, ...]


def compare_ibvi(
    settings: ComparisonSettings,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    processes: int = 1,
) -> list[Values]:
    """Train and judge everything; rows in the order of the settings.

    Rows are the same however many processes measure them (each runs torch in as many threads as this one), but for
    their seconds.

    Args:
        settings: the size.
        folder: of the finished rows (one file a data set); None keeps nothing.
        say: called with lines of progress.
        processes: how many rows are measured at once, each in a process of its own; 1 stays in this one.

    Raises:
        FileNotFoundError: if the data sets are not there.
        WorkerDiedError: if one of several processes was killed.
    """
    kept = {data: Rows(folder / f"{data}.json" if folder is not None else None) for data in settings.data}
    keys = [
        _key(settings, data, network, method, seed)
        for data in settings.data
        for seed in settings.seeds
        for network in settings.networks
        for method in settings.methods
    ]
    for key in keys:
        row = kept[key["data"]].find(key)
        if row is not None:
            say(f"    {_line(row)}")
    jobs = jobs_of(settings, [key for key in keys if kept[key["data"]].find(key) is None])
    with contextlib.closing(_reports(jobs, processes)) as reports:
        for key, values in reports:
            if isinstance(values, str):
                say(f"    {key['method']} is left out: {values}")
            else:
                say(f"    {_line(kept[key['data']].add(key, values))}")
    rows = (kept[key["data"]].find(key) for key in keys)
    return [row for row in rows if row is not None]


def jobs_of(settings: ComparisonSettings, keys: Sequence[Values]) -> list[Job]:
    """The jobs that measure the rows of these keys: data sets together, and of each the longest first."""
    grouped: dict[tuple[Any, ...], list[str]] = {}
    for key in keys:
        own = key["method"] in _OWN
        place = (settings.data.index(key["data"]), key["seed"], -COSTS.get(key["network"], 0), own)
        grouped.setdefault((*place, key["data"], key["network"]), []).append(key["method"])
    return [
        Job(settings, data, network, seed, tuple(methods))
        for (_, seed, _, _, data, network), methods in sorted(grouped.items())
    ]


def _reports(jobs: Sequence[Job], processes: int) -> Generator[Report, None, None]:
    if processes > 1 and len(jobs) > 1:
        yield from in_processes(measured, jobs, processes, torch.get_num_threads())
        return
    try:
        for job in jobs:
            yield from measured(job)
    finally:
        _material.cache_clear()


def measured(job: Job) -> Iterator[Report]:
    """Train and judge a job's rows: keys with values, or with the reason why a method is left out."""
    settings = job.settings
    material = _material(job.data, settings.sizes, job.seed)
    task = Task(
        NETWORKS[job.network],
        material.train,
        material.validation,
        settings.epochs[job.network],
        settings.samples,
        job.seed,
    )
    for method in job.methods:
        key = _key(settings, job.data, job.network, method, job.seed)
        try:
            yield key, _measure(task, method, material)
        except MissingLaplaceError as error:
            yield key, str(error)


def load_material(data: str, sizes: Sizes, seed: int) -> Material:
    """The images of a data set and, as unknown ones, those of the other."""
    return Material.of(load_dataset(data, seed), load_dataset(OTHER[data], seed), sizes, seed)


@functools.lru_cache(maxsize=1)
def _material(data: str, sizes: Sizes, seed: int) -> Material:
    """The material of the job before, where it is the same."""
    return load_material(data, sizes, seed)


def _key(settings: ComparisonSettings, data: str, network: str, method: str, seed: int) -> Values:
    architecture = NETWORKS[network]
    recipes = {name: dataclasses.asdict(getattr(architecture, name)) for name in _recipes_of(method)}
    return {
        "data": data,
        "network": network,
        "method": method,
        "seed": seed,
        "epochs": settings.epochs[network],
        "samples": settings.samples,
        "sizes": dataclasses.asdict(settings.sizes),
        "recipes": recipes,
    }


def _recipes_of(method: str) -> tuple[str, ...]:
    return (_OWN.get(method, "plain"),)


def _measure(task: Task, method: str, material: Material) -> Values:
    fitted = CONTESTANTS[method][1](task)
    watch = Stopwatch()
    metrics = judge(fitted.predict, material)
    return {
        "metrics": metrics,
        "train_seconds": fitted.seconds,
        "exam_seconds": watch.seconds(material.train[0].device),
        "stored_numbers": fitted.stored,
        "note": fitted.note,
    }


def _line(row: Values) -> str:
    key, m = row["key"], row["metrics"]
    return (
        f"{key['data']} {key['network']} {key['method']}: error {100 * m['error']:.2f} %, NLL {m['nll']:.3f}, "
        f"ECE {m['ece']:.3f}; corrupted {100 * m['corrupted_error']:.1f} %, {m['corrupted_nll']:.2f}, "
        f"{m['corrupted_ece']:.3f}; trained in {row['train_seconds']:.0f} s"
    )


@dataclass(frozen=True)
class Overhead:
    """What random layers add to a network: time of a training step relative to plain (median), stored numbers."""

    step_ratio: float
    added_memory: float


def overhead(architecture: Architecture, layers: Sequence[str], turns: int = 25) -> Overhead:
    """Training steps of both in turns, in processor seconds; parameters of the covariance over the network's own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = architecture.make()
        device = device_of(plain)
        x, y = torch.randn(BATCH, 1, 28, 28, device=device), torch.randint(10, (BATCH,), device=device)
        bayes = with_low_rank(architecture.make(), layers, architecture.ibvi)
        steps = (_step(plain, plain.parameters(), x, y), _step(bayes, groups(bayes, architecture.ibvi), x, y))
        for step in steps * 2:
            step()
        ratios = []
        for turn in range(turns):
            seconds = [0.0, 0.0]
            for side in (0, 1) if turn % 2 else (1, 0):
                watch = Stopwatch()
                steps[side]()
                seconds[side] = watch.seconds(device)
            ratios.append(seconds[1] / seconds[0])
    sizes = [sum(p.numel() for p in model.parameters()) for model in (plain, bayes)]
    return Overhead(statistics.median(ratios), sizes[1] / sizes[0] - 1.0)


def _step(model: nn.Module, parameters: Iterable[Any], x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer, loss = sgd(parameters, 1e-3), loss_of(model, 1)

    def step() -> None:
        optimizer.zero_grad()
        loss(x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
