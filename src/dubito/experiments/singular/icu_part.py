"""The part icu of the reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dubito.experiments.ibvi.processes import cores
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.experiments.singular.icu_study import (
    DISEASE,
    FIRST_DAY,
    FULL,
    OWN,
    IcuSettings,
    Ward,
    studies,
    ward_of,
)
from dubito.experiments.singular.paper_figures import MIMIC
from dubito.experiments.singular.rows import measure
from dubito.experiments.singular.verdict import (
    Column,
    Values,
    costs,
    of_variant,
    ood_picture,
    ood_target,
    recipes_in_words,
    saving_target,
    table,
)
from dubito.report import Table

FOLDER = Path("runs/singular")
PROCESSES = 2
PAPER = "Under each, the paper's: other data (MIMIC-III, unknown newborns)"
SEARCH = (
    "For full-rank mean field and low-rank factors they are the best of the same nine pairs, for the SVD start of the "
    "first five and for Rank-1 of the first two of them; SWAG's learning rate was not searched."
)


KNOWN = (
    Column("auroc", "AUROC", chance=".500"),
    Column("nll", "NLL"),
    Column("ece", "ECE"),
    Column("aupr_err", "AUPR-Err"),
    Column("error", "error, its chance"),
)
SHIFTED = (
    Column("shifted_auroc", "AUROC", chance=".500"),
    Column("shifted_nll", "NLL"),
    Column("shifted_ece", "ECE"),
)


def apart(known: int, shifted: int) -> tuple[Column, ...]:
    """Columns of how shifted patients are told; chance levels follow from the numbers of either kind."""
    share = shifted / (known + shifted)
    return (
        Column("ood_auroc", "OOD AUROC", chance=".500"),
        Column("aupr_out", "AUPR-OOD", chance=f"{share:.3f}"),
        Column("aupr_in", "AUPR-In", chance=f"{1 - share:.3f}"),
    )


def tables(rows: Sequence[Values], wards: Mapping[str, tuple[int, int]]) -> tuple[Table, ...]:
    """By study; `wards` has the numbers of known and shifted patients."""
    found: list[Table] = []
    for variant, name, shift in (
        (DISEASE, "SUPPORT2", "patients in coma, none of whom was trained on"),
        (OWN, "The paper's own setting, from the folder mimic-iii", "the patients of ood.csv"),
    ):
        if of_variant(rows, variant):
            found += [
                table(rows, variant, KNOWN, f"{name}, test patients. {PAPER}", MIMIC),
                table(rows, variant, apart(*wards[variant]), f"{name}, unknown: {shift}. {PAPER}", MIMIC),
                costs(rows, variant, f"{name}, cost. {PAPER}", MIMIC),
            ]
    if of_variant(rows, FIRST_DAY):
        known = "Network of the shared variables: SUPPORT2 test patients, day 3"
        found += [
            table(rows, FIRST_DAY, KNOWN, known),
            table(rows, FIRST_DAY, (*SHIFTED, *apart(*wards[FIRST_DAY])), "The same network: RHC, day 1"),
        ]
    return tuple(found)


def targets(rows: Sequence[Values]) -> dict[str, bool]:
    """What was to be shown, and whether it was; the held-out disease decides."""
    return ood_target(rows, DISEASE, "ood_auroc", "icu") | saving_target(rows, DISEASE)


def run_icu(job: PartJob, settings: IcuSettings | None = None, folder: Path | None = FOLDER) -> Outcome:
    """The part `icu`: all methods on both studies."""
    settings = settings or (FULL if job.full else IcuSettings())
    place = folder / ("full" if job.full else "default") if folder is not None else None
    asked = studies(settings)
    wards = {study.variant: ward_of(study.variant, settings.split) for study in asked}
    if place is not None:
        job.say(f"    finished rows are kept in {place} and taken up again")
    processes = max(1, min(PROCESSES, cores() // torch.get_num_threads()))
    rows = measure(asked, job.seeds, place, job.say, processes)
    return outcome(rows, wards, settings, job.seeds)


def outcome(
    rows: Sequence[Values], wards: Mapping[str, Ward], settings: IcuSettings, seeds: Sequence[int]
) -> Outcome:
    """Tables, picture and words of finished rows."""
    sizes = {variant: (len(ward.test[0]), len(ward.shifted[0])) for variant, ward in wards.items()}
    shown = {"coma": (DISEASE, "ood_auroc"), "day 1 (RHC)": (FIRST_DAY, "ood_auroc")}
    picture = ood_picture(rows, shown, "Shifted patients told by mutual information")
    values: dict[str, Any] = {"rows": list(rows), "seeds": list(seeds)}
    return Outcome(
        "Intensive care: death within 30 days",
        _paragraphs(wards, settings, seeds),
        tables(rows, sizes),
        (picture,),
        values,
        targets(rows),
    )


def _paragraphs(wards: Mapping[str, Ward], s: IcuSettings, seeds: Sequence[int]) -> tuple[str, ...]:
    first, second = wards[DISEASE], wards[FIRST_DAY]
    return (
        f"SUPPORT2 stands in for MIMIC-III: {len(first.train[0]):,} patients to train on, "
        f"{len(first.validation[0]):,} to validate, {len(first.test[0]):,} to test, {len(first.shifted[0]):,} in coma "
        "as the unknown. The outcome at two months, orders written during the stay and the disease are no features; "
        "gaps take the training median and are indicated, numbers are clipped 8 interquartile ranges outside quartiles "
        "and standardised, factors one-hot, all by training rows alone.",
        "RHC is the same cohort on day 1. Who shares age and sex with a training or validation patient is left out, "
        f"which leaves {len(second.shifted[0]):,} people; that study has its own network, of the shared variables.",
        f"{len(first.columns)}–{s.hidden}–{s.hidden}–1 ReLU, rank {s.rank} (head 1), Adam with a highest rate of "
        f"{s.lr:g} along a cosine, batches of {s.batch}, at most {s.epochs} epochs, the weights of the best validation "
        f"NLL, {s.samples} draws, seeds {list(seeds)}; no class weights. Time counts what a method starts from.",
        "Mean field and the low-rank factors start from scales of the fan-in, under priors of those scales. "
        + recipes_in_words(s.recipes, SEARCH),
    )
