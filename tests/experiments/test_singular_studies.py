"""The studies of the singular comparison on made data: who trains, who is asked, rows, resuming, targets, words."""

import csv
import dataclasses
import json
import pickle

import pytest
import torch
from torch import nn

import dubito
from dubito.data.beijing import COLUMNS, Hours
from dubito.data.csv_table import TableError
from dubito.data.icu import SHARED_FACTORS, SHARED_NUMBERS, Patients
from dubito.data.tabular import Features
from dubito.experiments.reproduction import PartJob
from dubito.experiments.reproductions import REPRODUCTIONS
from dubito.experiments.singular import air_part, icu_part, rows
from dubito.experiments.singular.air_study import (
    SEASON,
    SHUFFLED,
    VARIANT,
    AirSettings,
    DustNetwork,
    air_of,
    ranks_of,
    shuffled,
)
from dubito.experiments.singular.air_study import judge as judge_air
from dubito.experiments.singular.air_study import problem as air_problem
from dubito.experiments.singular.air_study import study as air_study
from dubito.experiments.singular.contestants import CONTESTANTS, Contest, Fitted, Problem, Recipe
from dubito.experiments.singular.icu_study import (
    DISEASE,
    FIRST_DAY,
    OWN_FOLDER,
    RECIPES,
    IcuSettings,
    by_day,
    by_disease,
    from_own,
    make_network,
)
from dubito.experiments.singular.icu_study import judge as judge_icu
from dubito.experiments.singular.icu_study import problem as icu_problem
from dubito.experiments.singular.icu_study import studies as icu_studies
from dubito.experiments.singular.markdown import markdown
from dubito.experiments.singular.paper_figures import BEIJING, MIMIC
from dubito.experiments.singular.rows import Bench, Study, measure
from dubito.experiments.singular.tuning import search, validation_nll
from dubito.experiments.singular.verdict import Column, costs, ood_target, saving_target, table

METHODS = ("deterministic", "mean-field", "low-rank")


def patients(count=200, seed=0, first=20.0, gap=0.25):
    """Of whom those with a high pulse die; one in ten is in coma; ages are all different."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {name: torch.randn(count, generator=generator).double() for name in (*SHARED_NUMBERS, "bun")}
    numbers["age"] = first + gap * torch.arange(count).double()
    numbers["alb"][::3] = torch.nan
    factors = dict.fromkeys((*SHARED_FACTORS, "income"), ("yes", "no") * (count // 2))
    person = tuple(zip(numbers["age"].tolist(), factors["sex"], strict=True))
    group = tuple("coma" if i % 10 == 9 else "other" for i in range(count))
    return Patients(Features(numbers, factors), numbers["hrt"] > 0.5, group, person)


@pytest.fixture(scope="module")
def ward():
    return by_disease(patients(), 0)


def quick(settings, **changes):
    return dataclasses.replace(settings, epochs=1, samples=3, patience=None, **changes)


# ------------------------------------------------------------------------------------------------------- icu


def test_coma_is_never_trained_on(ward):
    assert [len(part[0]) for part in (ward.train, ward.validation, ward.test, ward.shifted)] == [
        126,
        18,
        36,
        20,
    ]
    ages = [part[0][:, ward.columns.index("age")] for part in (ward.train, ward.validation, ward.test)]
    assert len(torch.cat(ages).unique()) == 180  # nobody twice
    assert not torch.isin(ward.shifted[0][:, 0], torch.cat(ages)).any()
    assert torch.allclose(ward.train[0][:, 0].mean(), torch.zeros(()), atol=1e-5)
    assert "alb missing" in ward.columns
    assert "bun missing" not in ward.columns


def test_the_division_is_that_of_the_seed():
    first, again, other = (by_disease(patients(), split).test[0] for split in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_on_the_first_day_nobody_is_asked_who_was_trained_on():
    cohort, early = patients(), patients(seed=1)  # the same people under other measurements
    late = by_day(cohort, early, 0)
    own = by_disease(cohort, 0)
    assert len(late.shifted[0]) == len(own.test[0]) == 36  # exactly the test patients are left, and no coma
    assert {"bun", "income=yes"}.isdisjoint(late.columns)
    strangers = by_day(cohort, patients(seed=1, first=500.0), 0)
    assert len(strangers.shifted[0]) == 180
    assert late.shifted_outcomes
    assert not own.shifted_outcomes


def test_scores_of_a_network_that_knows(ward):
    pulse = ward.columns.index("hrt")

    def predict(x):
        outputs = torch.stack([20 * (x[:, pulse : pulse + 1] + shift) for shift in (0.0, 0.1)])
        return dubito.Bernoulli().predictive(outputs)

    known = dataclasses.replace(ward, shifted=(ward.shifted[0], ward.shifted[1]), shifted_outcomes=True)
    found = judge_icu(known, Fitted(predict, 0, 0, 0.0))
    assert found["auroc"] == pytest.approx(1.0)
    assert found["shifted_auroc"] == pytest.approx(1.0)
    assert 0 < found["error"] < 0.3
    assert "shifted_auroc" not in judge_icu(ward, Fitted(predict, 0, 0, 0.0))
    sure = judge_icu(
        ward, Fitted(lambda x: dubito.Bernoulli().predictive(predict(x).draws[:1].logit()), 0, 0, 0.0)
    )
    assert sure["ood_auroc"] == pytest.approx(0.5)  # one draw: no mutual information, chance


def test_the_network_and_its_ranks(ward):
    given = icu_problem(ward, IcuSettings(), 0)
    assert next(tuple(p.shape) for p in given.network().parameters()) == (128, len(ward.columns))
    assert set(given.ranks) <= {name for name, _ in given.network().named_parameters()}
    assert tuple(given.ranks.values()) == (15, 15, 1)
    assert isinstance(make_network(3, 4), nn.Sequential)


def test_tables_of_ones_own(tmp_path, monkeypatch):
    folder = tmp_path / OWN_FOLDER
    folder.mkdir()
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    for stem, count in (("train", 40), ("test", 12), ("ood", 8)):
        with (folder / f"{stem}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["pulse", "age", "label"])
            writer.writerows([60 + i, 30 + 2 * i, i % 2] for i in range(count))
    ward = from_own(0)
    assert [len(p[0]) for p in (ward.train, ward.validation, ward.test, ward.shifted)] == [36, 4, 12, 8]
    (folder / "ood.csv").write_text("pulse,weight,label\n1,2,0\n")
    with pytest.raises(TableError, match=r"ood\.csv and train\.csv must have the same columns.*age, weight"):
        from_own(0)


# ------------------------------------------------------------------------------------------------------- air


@pytest.fixture(scope="module")
def hours():
    generator = torch.Generator().manual_seed(0)
    year = torch.arange(2010, 2015).repeat_interleave(240)
    values = torch.rand(len(year), len(COLUMNS), generator=generator, dtype=torch.float64)
    values[:, 0] = 50 + 20 * values[:, 0]
    values[700, 0] = torch.nan
    return Hours(values, year)


def test_windows_by_year_standardised_by_training_years(hours):
    air = air_of(hours, 24, (2, 3))
    # hour 700 is a gap, and in the windows of the 24 hours after it: 20 to train on, 5 to validate
    assert len(air.train[0]) == -(-(3 * 240 - 24 - 20) // 2)
    assert len(air.validation[0]) == -(-(240 - 5) // 3)
    assert len(air.test[0]) == 80
    known = hours.values[:720][~hours.values[:720, 0].isnan()]
    assert air.shift == pytest.approx(float(known[:, 0].mean()))
    dust = air.test[0][0, :, 0] * air.scale + air.shift
    assert torch.allclose(dust, hours.dust[960 - 24 : 960].float(), atol=1e-3)
    assert float(air.test[1][0]) == pytest.approx(float(hours.dust[960]), rel=1e-6)


def test_shifted_windows_are_the_test_windows_but_for_the_shift(hours):
    air = air_of(hours, 24)
    weather = slice(1, 11)
    season = air.shifted[SEASON]
    assert torch.equal(season[..., 0], air.test[0][..., 0])
    assert torch.equal(season[..., 11:], air.test[0][..., 11:])
    assert not torch.equal(season[..., weather], air.test[0][..., weather])
    mixed = air.shifted[SHUFFLED]
    assert not torch.equal(mixed, air.test[0])
    assert torch.equal(mixed.sort(1).values, air.test[0].sort(1).values)
    assert torch.equal(mixed, shuffled(air.test[0]))
    city = air_of(hours, 24, city=hours).shifted["guangzhou"]
    assert torch.equal(city, air.test[0])


def test_scores_are_in_the_unit_of_the_dust(hours):
    air = air_of(hours, 24)
    likelihood = dubito.Gaussian(0.5)

    def predict(x):
        last = x[:, -1, :1]
        return likelihood.predictive(torch.stack([last, last + 0.1 * x[:, -1, 1:2]]))

    found = judge_air(air, Fitted(predict, 0, 0, 0.0))
    persistence = (air.test[0][:, -1, :1] + 0.05 * air.test[0][:, -1, 1:2]) * air.scale + air.shift
    assert found["mae"] == pytest.approx(float((persistence - air.test[1]).abs().mean()), rel=1e-4)
    assert 0.0 < found["picp"] < 1.0
    assert found["epistemic_sd"] == pytest.approx(
        float(air.scale * 0.05 * air.test[0][:, -1, 1].abs().mean()), rel=1e-3
    )
    assert f"ood_auroc_{SHUFFLED}" in found


def test_the_lstm_and_its_ranks_are_the_papers():
    settings, network = AirSettings(), DustNetwork()
    assert sum(p.numel() for p in network.parameters()) == 54_081  # with both of torch's biases: 53,569 + 512
    ranks = ranks_of(settings)
    assert set(ranks) == {name for name, p in network.named_parameters() if p.ndim == 2}
    shapes = {name: p.shape for name, p in network.named_parameters()}
    factors = sum(2 * rank * sum(shapes[name]) for name, rank in ranks.items())
    assert factors == 2 * 14 * (15 + 256 + 64 + 256) + 4 * 20 * (64 + 256) + 2 * 65


def test_every_family_trains_the_lstm(hours):
    air = air_of(hours, 6, (8, 20))
    settings = quick(AirSettings(hidden=8, ranks=(3, 4), length=6, batch=32))
    contest = Contest(air_problem(air, settings, 0))
    for name in ("mean-field", "low-rank", "low-rank-svd", "rank-one", "swag"):
        found = judge_air(air, CONTESTANTS[name].train(contest))
        assert all(value == value for value in found.values()), name
        assert found["epistemic_sd"] > 0, name


# ------------------------------------------------------------------------------------------- rows and verdicts


def made_bench(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 12, generator=generator)
    y = (x[:, :1] > 0).float()
    network = lambda: nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))  # noqa: E731
    ranks = {"0.weight": 3, "2.weight": 1}
    given = Problem(network, dubito.Bernoulli, (x, y), (x, y), ranks, epochs=1, samples=3, seed=seed)
    return Bench(
        given, lambda fitted: {"auroc": 0.75, "ood_auroc": float(fitted.predict(x).epistemic.mean())}
    )


def made_study(**changes):
    return dataclasses.replace(Study("made", "small", {"epochs": 1}, made_bench, {}, METHODS), **changes)


def test_rows_are_kept_and_taken_up_again(tmp_path, monkeypatch):
    said = []
    first = measure([made_study()], (0, 1), tmp_path, said.append)
    assert [(r["key"]["seed"], r["key"]["method"]) for r in first] == [
        (s, m) for s in (0, 1) for m in METHODS
    ]
    assert len(said) == 6
    assert first[1]["variational"] > first[2]["variational"] > first[0]["variational"] == 0
    assert json.loads((tmp_path / "made.json").read_text()) == first
    trained = []
    train = rows._measured
    monkeypatch.setattr(rows, "_measured", lambda c, m, b: trained.append(m) or train(c, m, b))
    assert measure([made_study()], (0, 1), tmp_path) == first
    assert trained == []
    changed = made_study(recipes={"low-rank": Recipe(beta=0.1)})
    measure([changed], (0,), tmp_path)
    assert trained == ["low-rank"]  # alone depends on it
    measure([made_study(settings={"epochs": 2})], (0,), tmp_path)
    assert trained[1:] == list(METHODS)


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(measure([made_study(methods=("deterministic",))], (0,))) == 1
    assert list(tmp_path.iterdir()) == []


def row(method, seed, variational, **metrics):
    key = {"data": "made", "network": "small", "method": method, "seed": seed}
    return {
        "key": key,
        "metrics": metrics,
        "variational": variational,
        "stored": 9,
        "train_seconds": 2.0 + seed,
    }


def test_tables_show_spread_over_seeds_chance_and_the_paper():
    measured = [row("low-rank", seed, 1100, auroc=0.5 + 0.2 * seed, error=0.25) for seed in (0, 1)]
    columns = (Column("auroc", "AUROC", 2, chance=".500"), Column("error", "error"))
    paper = {"low-rank": {"auroc": ".895", "stored": "13.6k"}}
    made = table(measured, "small", columns, "Made", paper)
    assert [line.label for line in made.rows] == ["chance", "low-rank factors", "· paper"]
    assert made.rows[0].cells == (".500", "")
    assert made.rows[1].cells == ("0.60 ± 0.14", "0.250 ± 0.000")
    assert made.rows[2].cells == (".895", "–")
    assert table(measured, "small", columns[1:], "Made").rows[0].label == "low-rank factors"
    spent = costs(measured, "small", "Cost", paper)
    assert [line.cells for line in spent.rows] == [("1,100", "9", "2 ± 1"), ("–", "13.6k", "–")]
    assert "| low-rank factors | 0.60 ± 0.14 | 0.250 ± 0.000 |" in markdown([made], {"it holds": False})
    assert "- **missed**: it holds" in markdown([made], {"it holds": False})


@pytest.mark.parametrize(("low", "full", "met"), [(0.8, 0.7, True), (0.6, 0.7, False), (0.7, 0.7, True)])
def test_targets_compare_means(low, full, met):
    measured = [row("low-rank", 0, 30, ood=low), row("mean-field", 0, 90 if met else 89, ood=full)]
    assert list(ood_target(measured, "small", "ood", "made").values()) == [met]
    assert list(saving_target(measured, "small").values()) == [met]
    assert ood_target(measured[:1], "small", "ood", "made") == {}
    assert not any("chance" in words for words in ood_target(measured, "small", "ood", "made"))


def test_a_target_met_below_chance_says_so():
    measured = [row("low-rank", 0, 30, ood=0.49), row("mean-field", 0, 90, ood=0.48)]
    (words,) = ood_target(measured, "small", "ood", "made")
    assert words.endswith("neither is above chance")


def test_the_search_takes_the_least_validation_nll():
    given = dataclasses.replace(made_bench(0).problem, epochs=3, lr=0.05)
    grid = (Recipe(beta=1e-3), Recipe(beta=1e4, warmup=0.0))
    said = []
    best = search(given, ("low-rank",), grid, said.append)
    scores = []
    for recipe in grid:
        contest = Contest(dataclasses.replace(given, recipes={"low-rank": recipe}))
        scores.append(validation_nll(CONTESTANTS["low-rank"].train(contest), given.validation))
    assert best == {"low-rank": grid[scores.index(min(scores))]}
    assert f"{scores[0]:.4f}" in said[0]


def test_the_papers_figures_fit_the_methods():
    assert set(MIMIC) == set(BEIJING) == set(CONTESTANTS)
    assert MIMIC["low-rank"]["ood_auroc"] == ".802 ± .018"
    assert BEIJING["mean-field"]["picp"] == ".788 ± .012"
    assert all(name in CONTESTANTS for name in RECIPES)


def test_the_parts_are_registered_with_two_seeds():
    singular = REPRODUCTIONS["singular"]
    assert {"icu", "air"} <= set(singular.parts)
    assert singular.seeds == 2


def test_the_icu_part_from_patients_to_words(monkeypatch, tmp_path):
    monkeypatch.setattr("dubito.experiments.singular.icu_study.support2", patients)
    monkeypatch.setattr("dubito.experiments.singular.icu_study.rhc", lambda: patients(seed=1))
    monkeypatch.setattr("dubito.experiments.singular.icu_part.PROCESSES", 1)
    icu_part.ward_of.cache_clear()
    settings = quick(IcuSettings(hidden=6, rank=2), recipes={"low-rank": Recipe(beta=0.3)})
    try:
        found = icu_part.run_icu(PartJob(seeds=(0,)), settings, tmp_path)
    finally:
        icu_part.ward_of.cache_clear()
    assert {r["key"]["network"] for r in found.values["rows"]} == {DISEASE, FIRST_DAY}
    assert len(found.values["rows"]) == 2 * len(CONTESTANTS)
    methods = len(CONTESTANTS)
    assert [len(t.rows) for t in found.tables] == [
        2 * methods + 1,
        2 * methods + 1,
        2 * methods,
        methods + 1,
        methods + 1,
    ]
    assert found.tables[1].rows[0].cells == (".500", "0.357", "0.643")  # 20 in coma beside 36 to test
    assert any("OOD AUROC of low rank" in words for words in found.targets)
    assert any("≤ 1/3" in words for words in found.targets)
    assert "low-rank factors 0.3 and 0.1" in found.paragraphs[-1]
    json.dumps(dict(found.values))


def test_the_air_part_from_hours_to_words(monkeypatch, hours):
    settings = quick(AirSettings(hidden=4, ranks=(2, 2), length=4, batch=64), recipes={})
    air = air_of(hours, 4, (10, 20))
    monkeypatch.setattr(air_part, "read_air", lambda length, thinning: air)
    monkeypatch.setattr("dubito.experiments.singular.air_study.read_air", lambda length, thinning: air)
    monkeypatch.setattr(air_part, "PROCESSES", 1)
    found = air_part.run_air(PartJob(seeds=(0,)), settings, None)
    assert {r["key"]["network"] for r in found.values["rows"]} == {VARIANT}
    methods = 2 * len(CONTESTANTS)
    assert [len(t.rows) for t in found.tables] == [methods, methods, methods + 1, methods // 2 + 1, methods]
    assert found.tables[2].rows[0].cells == (".500", "0.500", "0.500", "")
    assert len(found.targets) == 1
    assert "Every method has the default" in found.paragraphs[-1]


def test_studies_can_be_handed_to_another_process(monkeypatch):
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    for made in (*icu_studies(IcuSettings()), air_study(AirSettings())):
        errand = rows.Errand((made,), 3, ((0, "low-rank"),))
        again = pickle.loads(pickle.dumps(errand))
        assert again.studies[0].key("low-rank", 3) == made.key("low-rank", 3)
        with pytest.raises(FileNotFoundError, match="DUBITO_DATA"):
            next(iter(rows.run_errand(again)))
