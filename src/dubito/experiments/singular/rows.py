"""Measuring: every method of a study, once a seed; each row is on the disk as soon as it is known.

A seed's rows share the plain network, so seeds, not rows, are spread over processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dubito.experiments.evaluation import Stopwatch
from dubito.experiments.ibvi.comparison import Rows
from dubito.experiments.ibvi.processes import in_processes
from dubito.experiments.singular.contestants import CONTESTANTS, Contest, Fitted, Problem, Recipe, as_tuple

Values = dict[str, Any]
Piece = tuple[Values, Values]  # a row's key and its values


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


@dataclass(frozen=True)
class Errand:
    """Rows of one seed that one process measures, one after the other; they share what a study's methods share."""

    studies: tuple[Study, ...]
    seed: int
    missing: tuple[tuple[int, str], ...]  # which study, which method


def measure(
    studies: Sequence[Study],
    seeds: Sequence[int],
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    processes: int = 1,
) -> list[Values]:
    """Train and judge everything; rows by seed, then study, then method.

    Rows are the same however many processes measure them, but for their seconds.

    Args:
        studies: what is measured.
        seeds: everything is repeated for each.
        folder: of finished rows, which are taken over (one file a part); None keeps nothing.
        say: called with a line for each row.
        processes: how many seeds at a time, each in a process of its own; 1 stays in this one.

    Raises:
        FileNotFoundError: if the data are not there.
        NonFiniteError: if a training came upon NaN or infinity.
        WorkerDiedError: if one of several processes was killed.
    """
    kept = {
        study.part: Rows(folder / f"{study.part}.json" if folder is not None else None) for study in studies
    }
    errands = []
    for seed in seeds:
        wanted = [(i, method) for i, study in enumerate(studies) for method in study.methods]
        missing = tuple(w for w in wanted if _kept(kept, studies[w[0]], w[1], seed, say) is None)
        if missing:
            errands.append(Errand(tuple(studies), seed, missing))
    with contextlib.closing(_pieces(errands, processes)) as pieces:
        for key, values in pieces:
            say(line(kept[key["data"]].add(key, values)))
    found = (
        kept[study.part].find(study.key(method, seed))
        for seed in seeds
        for study in studies
        for method in study.methods
    )
    return [row for row in found if row is not None]


def _kept(
    kept: Mapping[str, Rows], study: Study, method: str, seed: int, say: Callable[[str], None]
) -> Values | None:
    row = kept[study.part].find(study.key(method, seed))
    if row is not None:
        say(line(row))
    return row


def _pieces(errands: Sequence[Errand], processes: int) -> Generator[Piece, None, None]:
    if processes > 1 and len(errands) > 1:
        yield from in_processes(run_errand, errands, processes, torch.get_num_threads())
        return
    for errand in errands:
        yield from run_errand(errand)


def run_errand(errand: Errand) -> Iterator[Piece]:
    """Keys of rows with their values, as they are known."""
    for i, study in enumerate(errand.studies):
        methods = [method for j, method in errand.missing if j == i]
        if not methods:
            continue
        bench = study.bench(errand.seed)
        contest = Contest(bench.problem)
        for method in methods:
            yield study.key(method, errand.seed), _measured(contest, method, bench)


def line(row: Values) -> str:
    """A row in words, for progress: its first figures, which are the main ones."""
    key, metrics = row["key"], row["metrics"]
    shown = ", ".join(f"{name} {value:.3g}" for name, value in islice(metrics.items(), 4))
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
        "exam_seconds": watch.seconds(as_tuple(bench.problem.train[0])[0].device),
        "variational": fitted.variational,
        "stored": fitted.stored,
        "warnings": list(fitted.warnings),
    }
