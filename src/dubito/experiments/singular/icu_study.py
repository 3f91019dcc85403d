"""Deaths in intensive care: which patients train, which are asked, and what is measured."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dubito.data.csv_table import ENVIRONMENT, TableError
from dubito.data.icu import COMA, SHARED_FACTORS, SHARED_NUMBERS, Patients, patients_csv, rhc, support2
from dubito.data.images import stratified_split
from dubito.data.tabular import Features, Preparation
from dubito.experiments.singular.contestants import Fitted, Problem, Recipe
from dubito.experiments.singular.rows import Bench, Study
from dubito.likelihoods import Bernoulli
from dubito.metrics import classification_metrics
from dubito.ood import aupr_error, auroc, ood_metrics
from dubito.predictive import Predictive

DISEASE, FIRST_DAY, OWN = "held-out disease", "first day", "MIMIC-III"
SHARES = (0.7, 0.1, 0.2)  # train, validation, test
OWN_FOLDER = "mimic-iii"

#: Chosen by validation NLL on the held-out-disease study under seed 100 (`tuning.py`), which is not reported: of nine
#: pairs for mean field and for low rank, of the first five and two of these for the SVD start and Rank-1.
RECIPES: Mapping[str, Recipe] = {
    "mean-field": Recipe(beta=1.0, scale=0.03),
    "low-rank": Recipe(beta=0.1, scale=0.1),
    "low-rank-svd": Recipe(beta=0.1, scale=0.3),
    "rank-one": Recipe(beta=0.1, scale=0.1),
}


@dataclass(frozen=True)
class IcuSettings:
    """The size; the default is minutes, `FULL` the paper's.

    Attributes:
        hidden: width of both hidden layers.
        rank: of their factors; the head has rank 1.
        epochs: most passes over the training patients.
        patience: epochs without a better validation NLL.
        lr: highest learning rate of Adam.
        batch: patients a step.
        samples: draws of the weights in a prediction.
        split: seed of the division into train, validation and test, the same for all seeds of training.
    """

    hidden: int = 128
    rank: int = 15
    epochs: int = 40
    patience: int = 12
    lr: float = 1e-3
    batch: int = 64
    samples: int = 32
    split: int = 0
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: RECIPES)


FULL = IcuSettings(epochs=256, patience=64, samples=512)


@dataclass(frozen=True)
class Ward:
    """Prepared patients: matrices `(N, columns)` and outcomes `(N, 1)`, zeros and ones.

    Attributes:
        train, validation, test: who died, of the population trained on.
        shifted: patients of another population.
        shifted_outcomes: whether their outcomes are asked too, or only whether the network knows them.
        columns: names of the matrices' columns.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: tuple[Tensor, Tensor]
    shifted_outcomes: bool
    columns: tuple[str, ...]


def by_disease(patients: Patients, split: int) -> Ward:
    """Train on every disease but coma; patients in coma are the shifted ones."""
    own, coma = _divided(patients)
    train, validation, test = (
        own.rows(part) for part in stratified_split(own.died.long(), _sizes(len(own)), split)
    )
    return _ward(
        *((part.features, part.died) for part in (train, validation, test, coma)), shifted_outcomes=False
    )


def by_day(patients: Patients, first_day: Patients, split: int) -> Ward:
    """Train as `by_disease`, on the variables shared with RHC, whose patients on day 1 are the shifted ones.

    Left out of those is who has the age and sex of a training or validation patient, for the two tables hold the same
    people; and who is in coma.
    """
    own, _ = _divided(patients)
    train, validation, test = (
        own.rows(part) for part in stratified_split(own.died.long(), _sizes(len(own)), split)
    )
    shifted = _divided(first_day)[0].unseen(train).unseen(validation)
    return _ward(
        *(
            (part.features.only(SHARED_NUMBERS, SHARED_FACTORS), part.died)
            for part in (train, validation, test, shifted)
        ),
        shifted_outcomes=True,
    )


def from_own(split: int) -> Ward:
    """`train.csv`, `test.csv` and `ood.csv` of the folder `mimic-iii`; a tenth of the first is for validation."""
    features, died = patients_csv("train", folder=OWN_FOLDER)
    held = len(died) // 10
    train, validation = stratified_split(died.long(), (len(died) - held, held), split)
    parts = [(features.rows(train), died[train]), (features.rows(validation), died[validation])]
    for stem in ("test", "ood"):
        found, outcome = patients_csv(stem, folder=OWN_FOLDER)
        if set(found.numbers) != set(features.numbers):
            odd = sorted(set(found.numbers) ^ set(features.numbers))
            raise TableError(
                f"{stem}.csv and train.csv must have the same columns; only one has {', '.join(odd)}"
            )
        parts.append((found, outcome))
    return _ward(*parts, shifted_outcomes=False)


def _divided(patients: Patients) -> tuple[Patients, Patients]:
    """All but patients in coma, and those."""
    coma = torch.tensor([group == COMA for group in patients.group])
    return patients.rows((~coma).nonzero().squeeze(1)), patients.rows(coma.nonzero().squeeze(1))


def _sizes(count: int) -> tuple[int, int, int]:
    validation, test = (round(share * count) for share in SHARES[1:])
    return count - validation - test, validation, test


def _ward(*parts: tuple[Features, Tensor], shifted_outcomes: bool) -> Ward:
    prepare = Preparation.fit(parts[0][0])
    made = [(prepare(features), died[:, None].float()) for features, died in parts]
    return Ward(made[0], made[1], made[2], made[3], shifted_outcomes, prepare.names)


def judge(ward: Ward, fitted: Fitted) -> dict[str, float]:
    """Discrimination, calibration, and how well mutual information tells errors and shifted patients.

    `auroc` of the outcome; `nll` (nats), `ece` (15 bins of equal width), `error`; `aupr_err` by mutual information and
    `aupr_err_entropy` by entropy, whose chance is `error`; `ood_auroc`, `aupr_out`, `aupr_in` by mutual information and
    `ood_auroc_entropy`; with outcomes of the shifted patients also `shifted_auroc`, `shifted_nll`, `shifted_ece`.
    """
    known, other = fitted.predict(ward.test[0]), fitted.predict(ward.shifted[0])
    found = _outcomes(known, ward.test[1])
    right = known.prediction == ward.test[1]
    apart = ood_metrics(known.mutual_information, other.mutual_information)
    found |= {
        "error": 1.0 - float(right.double().mean()),
        "aupr_err": float(aupr_error(known.mutual_information, right)),
        "aupr_err_entropy": float(aupr_error(known.entropy, right)),
        "ood_auroc": apart.auroc,
        "aupr_out": apart.aupr_out,
        "aupr_in": apart.aupr_in,
        "ood_auroc_entropy": ood_metrics(known.entropy, other.entropy).auroc,
    }
    if ward.shifted_outcomes:
        found |= {f"shifted_{name}": value for name, value in _outcomes(other, ward.shifted[1]).items()}
    return found


def _outcomes(predictive: Predictive, died: Tensor) -> dict[str, float]:
    table = classification_metrics(predictive, died)
    return {"auroc": float(auroc(predictive.probs, died)), "nll": table["nll"], "ece": table["ece"]}


def make_network(columns: int, hidden: int) -> nn.Module:
    """columns–hidden–hidden–1 with ReLU, at torch's initialisation."""
    return nn.Sequential(
        nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def problem(ward: Ward, settings: IcuSettings, seed: int) -> Problem:
    """The network and the patients it learns from."""
    return Problem(
        partial(make_network, len(ward.columns), settings.hidden),
        Bernoulli,
        ward.train,
        ward.validation,
        {"0.weight": settings.rank, "2.weight": settings.rank, "4.weight": 1},
        epochs=settings.epochs,
        lr=settings.lr,
        batch=settings.batch,
        samples=settings.samples,
        seed=seed,
        patience=settings.patience,
        recipes=settings.recipes,
    )


@lru_cache(maxsize=4)
def ward_of(variant: str, split: int) -> Ward:
    """The patients of a study, read from their files.

    Raises:
        FileNotFoundError: if they are not there.
    """
    if variant == OWN:
        return from_own(split)
    return by_disease(support2(), split) if variant == DISEASE else by_day(support2(), rhc(), split)


def bench(variant: str, settings: IcuSettings, seed: int) -> Bench:
    """Of a study and a seed."""
    ward = ward_of(variant, settings.split)
    return Bench(problem(ward, settings, seed), partial(judge, ward))


def studies(settings: IcuSettings) -> tuple[Study, ...]:
    """The two on the stand-in data, and the paper's own where its folder is there."""
    plain = {k: v for k, v in dataclasses.asdict(settings).items() if k != "recipes"}
    parent = os.environ.get(ENVIRONMENT)
    own = parent is not None and (Path(parent) / OWN_FOLDER).is_dir()
    return tuple(
        Study("icu", variant, plain, partial(bench, variant, settings), settings.recipes)
        for variant in (DISEASE, FIRST_DAY, *((OWN,) if own else ()))
    )
