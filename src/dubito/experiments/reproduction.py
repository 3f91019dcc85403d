"""Reproductions of papers: what one is made of, and running its parts.

A system adds its own by one `Reproduction` in `dubito.experiments.reproductions`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dubito.report import Picture, Report, Section, Table


class UnknownReproductionError(ValueError):
    """No reproduction, or no part of one, has the name given; the message lists those there are."""


@dataclass(frozen=True)
class PartJob:
    """What a part is asked to do.

    Attributes:
        full: the paper's own size, however long it takes.
        seeds: everything random is repeated for each.
        say: called with a line of progress.
        progress: whether to show progress bars.
    """

    full: bool = False
    seeds: tuple[int, ...] = (0,)
    say: Callable[[str], None] = lambda text: None
    progress: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a part found.

    Attributes:
        title: of its section.
        paragraphs: what was done, where it departs from the paper, and what came out.
        tables: measured figures beside the paper's.
        pictures: figures, with words.
        values: everything measured, as plain values for JSON.
        targets: what was to be shown, in words, and whether it was.
        seconds: wall time.
    """

    title: str
    paragraphs: tuple[str, ...]
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...]
    values: Mapping[str, Any]
    targets: Mapping[str, bool] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Part:
    """One experiment of a paper."""

    summary: str
    run: Callable[[PartJob], Outcome]


@dataclass(frozen=True)
class Reproduction:
    """A paper's experiments by name; `seeds` is how often each is repeated where nothing is said."""

    name: str
    title: str
    summary: str
    parts: Mapping[str, Part]
    seeds: int = 1


@dataclass
class Reproduced:
    """A reproduction in the making; it grows part by part."""

    reproduction: Reproduction
    full: bool
    seeds: tuple[int, ...]
    planned: tuple[str, ...]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every part asked for is there."""
        return len(self.outcomes) == len(self.planned)

    def as_dict(self) -> dict[str, Any]:
        """Everything but pictures, as plain values for JSON."""
        parts = {
            name: {
                "seconds": round(outcome.seconds, 1),
                "targets": dict(outcome.targets),
                "values": dict(outcome.values),
            }
            for name, outcome in self.outcomes.items()
        }
        return {
            "name": self.reproduction.name,
            "full": self.full,
            "seeds": list(self.seeds),
            "complete": self.complete,
            "parts": parts,
        }

    def report(self) -> Report:
        """The page: a section a part.

        Raises:
            ValueError: if no part has finished.
        """
        if not self.outcomes:
            raise ValueError("there is nothing to report: no part has finished")
        return Report(
            self.reproduction.title,
            (self.reproduction.summary,),
            sections=tuple(
                Section(o.title, (*o.paragraphs, *said(o.targets)), (), o.pictures, o.tables)
                for o in self.outcomes.values()
            ),
        )


def said(targets: Mapping[str, bool]) -> tuple[str, ...]:
    """Each target and whether it was met, in words."""
    return tuple(f"{'Shown' if met else 'Not shown'}: {what}." for what, met in targets.items())


def chosen_parts(reproduction: Reproduction, names: Sequence[str] | None) -> tuple[str, ...]:
    """The parts asked for, each once, in the reproduction's order; None or nothing means all.

    Raises:
        UnknownReproductionError: for a part there is not, listing those there are.
    """
    wanted = set(names or reproduction.parts)
    unknown = sorted(wanted - set(reproduction.parts))
    if unknown:
        raise UnknownReproductionError(
            f"{reproduction.name} has no part {unknown[0]!r}; there are {', '.join(reproduction.parts)}"
        )
    return tuple(name for name in reproduction.parts if name in wanted)


def reproduce(
    reproduction: Reproduction,
    parts: Sequence[str] | None = None,
    full: bool = False,
    seeds: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: bool = False,
    on_part: Callable[[Reproduced], None] | None = None,
) -> Reproduced:
    """Run the parts of a reproduction, one after the other.

    Args:
        reproduction: one of `dubito.experiments.reproductions.REPRODUCTIONS`.
        parts: their names; None takes all.
        full: the paper's own size rather than one that takes minutes.
        seeds: how many times everything random is repeated (0, 1, …); None: the reproduction's own number.
        say: called with lines of progress.
        progress: show progress bars on a terminal.
        on_part: called after each part with what there is so far.

    Raises:
        UnknownReproductionError: for a part there is not.
        ValueError: for seeds below 1.
        MissingExtraError, FileNotFoundError: if the data of a part are not there.
        NonFiniteError: if a training came upon NaN or infinity.
    """
    names = chosen_parts(reproduction, parts)
    seeds = reproduction.seeds if seeds is None else seeds
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1; got {seeds}")
    result = Reproduced(reproduction, full, tuple(range(seeds)), names)
    for number, name in enumerate(names, 1):
        say(f"{number}/{len(names)} {name}: {reproduction.parts[name].summary}")
        started = time.perf_counter()
        outcome = reproduction.parts[name].run(PartJob(full, result.seeds, say, progress))
        seconds = time.perf_counter() - started
        result.outcomes[name] = Outcome(**{**vars(outcome), "seconds": seconds})
        if on_part is not None:
            on_part(result)
    return result
