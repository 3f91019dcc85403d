"""The four parts of the reproduction."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dubito.experiments.cvp.comparison import FULL, SPREADS, TRYING, CvpSettings, measure
from dubito.experiments.cvp.verdict import (
    TITLES,
    Values,
    in_words,
    overall,
    picture,
    tables,
    targets,
)
from dubito.experiments.ibvi.comparison import Rows
from dubito.experiments.ibvi.processes import cores
from dubito.experiments.reproduction import Outcome, PartJob

FOLDER = Path("runs/cvp")
PROCESSES = 2


def run_part(
    part: str, job: PartJob, settings: CvpSettings | None = None, folder: Path | None = FOLDER
) -> Outcome:
    """One part: all methods on all seeds.

    Raises:
        FileNotFoundError: if the data are not there.
        MissingExtraError: for sentences, without the package ``tokenizers``.
    """
    settings = settings or (FULL if job.full else CvpSettings())
    place = folder / ("full" if job.full else "default") if folder is not None else None
    if place is not None:
        job.say(f"    posteriors and finished rows are kept in {place} and taken up again")
    processes = max(1, min(PROCESSES, cores() // torch.get_num_threads()))
    rows = measure((part,), settings, job.seeds, place, job.say, processes)
    return outcome(rows, part, settings, job.seeds, others(part, settings, job.seeds, place))


def others(part: str, settings: CvpSettings, seeds: Sequence[int], folder: Path | None) -> Sequence[Values]:
    """Finished rows of the other parts under the same settings."""
    if folder is None:
        return []
    found: list[Values] = []
    for other in TITLES:
        kept = Rows(folder / f"{other}.json") if other != part else Rows()
        keys = [settings.key(other, method, seed) for seed in seeds for method in settings.rows_of(seed)]
        found += [row for row in map(kept.find, keys) if row is not None]
    return found


def outcome(
    rows: Sequence[Values],
    part: str,
    settings: CvpSettings,
    seeds: Sequence[int],
    more: Sequence[Values] = (),
) -> Outcome:
    """Tables, picture and words of finished rows; `more` are those of other parts, for what is said of all."""
    return Outcome(
        TITLES[part],
        (*_paragraphs(rows, part, settings, seeds), *in_words(rows, part)),
        tables(rows, part),
        (picture(rows, part),),
        {"rows": [_without_examples(row) for row in rows], "seeds": list(seeds)},
        {**targets(rows, part), **overall([*rows, *more])},
    )


def _without_examples(row: Values) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in ("confidence", "wrong")}


def _paragraphs(
    rows: Sequence[Values], part: str, settings: CvpSettings, seeds: Sequence[int]
) -> tuple[str, ...]:
    sizes, recipe = settings.sizes, settings.recipes[part]
    trained = {int(r["key"]["seed"]): r for r in rows}
    spreads = ", ".join(f"{trained[seed]['spread']:g}" for seed in seeds if seed in trained)
    warm = f"{recipe.warm} epochs of AdamW for the means, then " if recipe.warm else ""
    return (
        f"At most {sizes.train or 'all'} examples to train, {sizes.validation or 'all'} for validation, "
        f"{sizes.test or 'all'} to be judged on, {sizes.unknown or 'all'} unknown ones; seeds {list(seeds)}. {warm}"
        f"{recipe.epochs} epochs of IVON (lr {recipe.lr:g}, ess the number of training examples, first curvature "
        f"{recipe.hess_init:g}, beta2 {recipe.beta2:g}, weight decay {recipe.weight_decay:g}), along cosines.",
        f"The posterior's standard deviations are multiplied by one of {', '.join(f'{s:g}' for s in SPREADS)}, by the "
        f"NLL of {TRYING} draws on the validation examples (by seed: {spreads}). Temperatures, scales, alphas and "
        "correlations are fitted on the same examples; no test figure had a part in any choice.",
        "AURC is the area by the trapezoid rule, × 100; C@R the largest coverage at that risk. One draw of the weights "
        f"serves all test examples; metrics of 4, 16 and 64 draws are means over up to eight disjoint sets of the "
        f"{settings.budget.draws}. Cost: eager passes of the mean network on a batch of 256, in brackets under "
        "torch.compile.",
    )


def part_runner(part: str) -> Callable[[PartJob], Outcome]:
    """The function that runs a part."""
    return functools.partial(run_part, part)
