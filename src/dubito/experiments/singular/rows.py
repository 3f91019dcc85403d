"""Measuring: every method of a study, once a seed; each row is on the disk as soon as it is known.

A seed's rows share the plain network, so seeds, not rows, are spread over processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dubito.experiments.evaluation import Stopwatch
from dubito.experiments.ibvi.comparison import Rows
from dubito.experiments.singular.contestants import CONTESTANTS, Contest, Fitted, Problem, Recipe

Values = dict[str, Any]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Bench:
    """A problem, and how whoever learned it is judged: by test data, which no method sees."""

    problem: Problem
    judge: Callable[[Fitted], Mapping[str, float]]


@dataclass(frozen=True)
class Study:
    """What is measured.

    Attributes:
        part: of the reproduction.
        variant: of the network or its data, where a part has several.
        settings: plain values that a row depends on, besides method, seed and recipe.
        bench: by seed, the problem and its judge; a module's function or a partial of one, since processes get it.
        recipes: by method, as `bench` hands them on.
        methods: names in `CONTESTANTS`.
    """

    part: str
    variant: str
    settings: Mapping[str, Any]
    bench: Callable[[int], Bench]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    methods: tuple[str, ...] = tuple(CONTESTANTS)

    def key(self, method: str, seed: int) -> Values:
        """What a row depends on."""
        recipe = dataclasses.asdict(self.recipes.get(method, Recipe()))
        return {
            "data": self.part,
            "network": self.variant,
            "method": method,
            "seed": seed,
            "settings": dict(self.settings),
            "recipe": recipe,
        }


def measure(
    studies: Sequence[Study],
    seeds: Sequence[int],
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    processes: int = 1,
) -> list[Values]:
    """Train and judge everything; rows by seed, then study, then method.

    Args:
        studies: what is measured.
        seeds: everything is repeated for each.
        folder: of finished rows, which are taken over (one file a part and seed); None keeps nothing.
        say: called with a line for each row.
        processes: how many seeds at a time, each in a process of its own with one thread; 1 stays in this one.

    Raises:
        FileNotFoundError: if the data are not there.
        NonFiniteError: if a training came upon NaN or infinity.
    """
    if processes > 1 and len(seeds) > 1:
        return _measure_in_processes(studies, seeds, folder, say, min(processes, len(seeds)))
    return [row for seed in seeds for row in rows_of_seed(studies, seed, folder, say)]


def rows_of_seed(
    studies: Sequence[Study],
    seed: int,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Values]:
    """The rows of one seed: those found, and the others measured."""
    found = []
    for study in studies:
        rows = Rows(_path(folder, study, seed))
        contest: Contest | None = None
        for method in study.methods:
            row = rows.find(study.key(method, seed))
            if row is None:
                if contest is None:
                    bench = study.bench(seed)
                    contest = Contest(bench.problem)
                row = rows.add(study.key(method, seed), _measured(contest, method, bench))
            say(line(row))
            found.append(row)
    return found


def line(row: Values) -> str:
    """A row in words, for progress."""
    key, metrics = row["key"], row["metrics"]
    shown = ", ".join(f"{name} {value:.3g}" for name, value in metrics.items())
    return (
        f"    {key['network']}, seed {key['seed']}, {key['method']} ({row['train_seconds']:.0f} s): {shown}"
    )


def _measured(contest: Contest, method: str, bench: Bench) -> Values:
    fitted = CONTESTANTS[method].train(contest)
    watch = Stopwatch()
    metrics = dict(bench.judge(fitted))
    return {
        "metrics": metrics,
        "train_seconds": fitted.seconds,
        "exam_seconds": watch.seconds(_CPU),
        "variational": fitted.variational,
        "stored": fitted.stored,
        "warnings": list(fitted.warnings),
    }


def _path(folder: Path | None, study: Study, seed: int) -> Path | None:
    return None if folder is None else folder / f"{study.part}-{seed}.json"


def _measure_in_processes(
    studies: Sequence[Study],
    seeds: Sequence[int],
    folder: Path | None,
    say: Callable[[str], None],
    processes: int,
) -> list[Values]:
    from concurrent.futures import Future, ProcessPoolExecutor, wait
    from multiprocessing import get_context

    told: set[str] = set()
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures: list[Future[list[Values]]] = [
            pool.submit(rows_of_seed, studies, seed, folder) for seed in seeds
        ]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=2.0)
            _tell(studies, seeds, folder, told, say)
            if any(future.exception() is not None for future in done):
                pool.shutdown(wait=False, cancel_futures=True)
        return [row for future in futures for row in future.result()]


def _tell(
    studies: Sequence[Study],
    seeds: Sequence[int],
    folder: Path | None,
    told: set[str],
    say: Callable[[str], None],
) -> None:
    """Say the rows that have come to the disk since."""
    for seed in seeds:
        for study in studies:
            rows = Rows(_path(folder, study, seed))
            for method in study.methods:
                row = rows.find(study.key(method, seed))
                if row is not None and (text := line(row)) not in told:
                    told.add(text)
                    say(text)
