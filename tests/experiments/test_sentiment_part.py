"""The sentiment experiment on made sentences: what is learned from, how it is judged, tables, targets, resumption."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

pytest.importorskip("tokenizers")

from dubito.data.sentiment import Sentences
from dubito.experiments.reproduction import PartJob
from dubito.experiments.singular import sentiment_tuning
from dubito.experiments.singular.contestants import CONTESTANTS, Fitted, Recipe
from dubito.experiments.singular.paper_figures import SST2 as PAPER_SST2
from dubito.experiments.singular.sentiment_exam import (
    FULL,
    MOVIES,
    SST2,
    Material,
    SentimentSettings,
    agreement,
    judge,
    spearman,
    study,
)
from dubito.experiments.singular.sentiment_part import outcome, run_sentiment, targets
from dubito.predictive import Predictive

GOOD, BAD, NEUTRAL = ("fine", "lovely", "great"), ("dull", "awful", "weak"), ("film", "plot", "cast", "score")
SMALL = SentimentSettings(
    methods=("deterministic", "low-rank"),
    vocabulary=80,
    length=8,
    width=8,
    inner=8,
    rank=2,
    epochs=1,
    samples=3,
    unknown=30,
)


def line(number: int, rng: random.Random) -> str:
    good = number % 2
    words = [
        rng.choice(NEUTRAL),
        "is",
        rng.choice(GOOD if good else BAD),
        "and",
        rng.choice(GOOD if good else BAD),
    ]
    ratings = [(1 if good else -1) * rng.randint(0, 3) for _ in range(4)] + [2 if good else -2]
    mean = sum(ratings) / len(ratings)
    return f"{number}\t{mean}\t{' '.join(map(str, ratings))}\t{' '.join(words)} {number}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = random.Random(0)
    (tmp_path / "sentiment").mkdir()
    for source, count in (
        ("movie_reviews", 300),
        ("tweets", 40),
        ("nyt_editorials", 40),
        ("amazon_reviews", 40),
    ):
        lines = "".join(line(i, rng) for i in range(count))
        (tmp_path / "sentiment" / f"{source}.tsv").write_text("id\tmean\tratings\ttext\n" + lines)
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    return tmp_path


def test_pieces_come_from_training_sentences_alone(folder: Path) -> None:
    material = Material.load(SMALL)
    assert material.data == MOVIES
    train = set(" ".join(material.split.train.texts).lower())
    assert all(set(piece.removeprefix("##")) <= train for piece in material.pieces.vocabulary[3:])
    assert material.inputs["train"].shape == (len(material.split.train), 8)
    assert {len(one) for one in material.unknown.values()} == {30}
    few = Material.load(dataclasses.replace(SMALL, train=50))
    assert len(few.split.train) == 50
    assert set(few.split.train.texts) < set(material.split.train.texts)
    assert few.split.test.texts == material.split.test.texts


def test_every_method_is_trained_and_judged_and_rows_are_taken_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PartJob(seeds=(0,))
    found = run_sentiment(job, SMALL, folder / "rows")
    rows = found.values["rows"]
    assert [(row["key"]["seed"], row["key"]["method"]) for row in rows] == [(0, m) for m in SMALL.methods]
    plain, low_rank = rows
    assert plain["variational"] == 0 < low_rank["variational"]
    assert plain["metrics"]["tweets_auroc"] == 0.5
    assert low_rank["metrics"]["tweets_mi_ratio"] > 0
    assert len(found.tables) == 3 + 3 + 1
    assert len(found.pictures) == 1
    monkeypatch.setattr(Material, "load", classmethod(lambda cls, settings: pytest.fail("measured anew")))
    assert run_sentiment(job, SMALL, folder / "rows").values["rows"] == rows


def fitted(probs: torch.Tensor) -> Fitted:
    """Predicts given draws (S, N) of the second class by the first number of each sentence."""
    draws = torch.stack([1 - probs, probs], -1)
    return Fitted(lambda x: Predictive.from_draws("categorical", draws[:, x[:, 0]]), 0, 0, 0.0)  # type: ignore[index]


def test_metrics_by_hand() -> None:
    # 0 to 3 are the test, the third of two minds; 4 and 5 are unknown, and the draws differ most there
    probs = torch.tensor(
        [[0.1, 0.85, 0.6, 0.95, 0.05, 0.95], [0.1, 0.85, 0.4, 0.95, 0.95, 0.05]], dtype=torch.float64
    )
    labels = torch.tensor([0, 1, 1, 0])
    ratings = ((1, 1, 1, 2), (2, 2, 2, 2), (-4, 4, 0, 1), (-1, -1, 1, -1))
    test = Sentences("made", ("a", "b", "c", "d"), labels, ratings, torch.tensor([1.0, 2.0, 0.6, -0.6]))
    split = dataclasses.make_dataclass("Split", ["test", "ambiguous"])(test, test.subset([]))
    material = Material(
        "made",
        split,
        None,
        {"test": torch.arange(4)[:, None]},
        {"tweets": torch.tensor([[4], [5]])},  # type: ignore[arg-type]
    )
    metrics = judge(material, fitted(probs))
    assert metrics["accuracy"] == 0.5  # of two minds goes to the first class
    nll = -torch.tensor([0.9, 0.85, 0.5, 0.05], dtype=torch.float64).log().mean()
    assert metrics["nll"] == pytest.approx(float(nll))
    assert metrics["tweets_auroc"] == 1.0
    assert metrics["tweets_aupr_out"] == 1.0
    assert metrics["tweets_aupr_out_chance"] == pytest.approx(1 / 3)
    assert metrics["tweets_aupr_in_chance"] == pytest.approx(2 / 3)
    assert metrics["tweets_mi_ratio"] > 10
    assert metrics["aleatoric_sd"] == pytest.approx(0.2)  # ranks 2, 3, 4, 1 and 2, 1, 4, 3
    assert metrics["epistemic_sd"] > 0  # only the third has any, whose raters differ most


def test_spearman_is_scipys_ties_included() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        a = torch.randint(6, (15,), generator=generator).double()
        b = a + 3 * torch.rand(15, generator=generator).round().double()
        assert spearman(a, b) == pytest.approx(spearmanr(a.numpy(), b.numpy()).statistic, abs=1e-12)
    assert spearman(torch.ones(4), torch.arange(4.0)) == 0.0


def test_agreement_finds_who_differs() -> None:
    ratings = tuple((n, -n, 0, n) for n in range(1, 5))
    sentences = Sentences("made", ("a",) * 4, ratings=ratings)
    rising = torch.tensor([0.9, 0.8, 0.7, 0.6], dtype=torch.float64)
    found = agreement(
        Predictive.from_draws("categorical", torch.stack([1 - rising, rising], -1)[None]), sentences
    )
    assert found["aleatoric_sd"] == found["total_sd"] == pytest.approx(1.0)
    assert found["epistemic_sd"] == found["aleatoric_sign"] == 0.0  # nothing epistemic; the same signs in all


def rows(low: float, mean: float) -> list[dict[str, object]]:
    def row(method: str, seed: int, auroc: float) -> dict[str, object]:
        names = (
            "auroc",
            "aupr_out",
            "aupr_in",
            "aupr_out_chance",
            "aupr_in_chance",
            "auroc_entropy",
            "mi_ratio",
        )
        metrics = dict.fromkeys(("accuracy", "nll", "ece", "aupr_succ", "aupr_succ_chance"), 0.5)
        for source in ("tweets", "nyt_editorials"):
            metrics |= {f"{source}_{name}": auroc for name in names}
        key = {"network": SST2, "method": method, "seed": seed}
        return {
            "key": key, "metrics": metrics, "stored": 9, "variational": 9, "train_seconds": 1.0, "exam_seconds": 1.0
        }  # fmt: skip

    pairs = (("low-rank", low), ("mean-field", mean))
    return [row(method, seed, value + 0.01 * seed) for method, value in pairs for seed in (0, 1)]


def test_target_compares_factors_with_mean_field() -> None:
    ((words, met),) = targets(rows(0.7, 0.6)).items()
    assert met
    assert "tweets and editorials" in words
    assert "(0.705) ≥ full-rank mean field's (0.605)" in words
    assert not next(iter(targets(rows(0.6, 0.7)).values()))
    assert targets(rows(0.6, 0.7)[:2]) == {}


def test_without_ratings_nothing_is_said_of_raters_and_the_papers_figures_stand_apart() -> None:
    found = outcome(rows(0.7, 0.6), SMALL, (0, 1))  # type: ignore[arg-type]
    captions = [table.caption for table in found.tables]
    assert not any("raters" in caption for caption in captions)
    assert captions[1] == "Cost"
    assert "OTHER DATA" in captions[2]
    by_title = dict(zip(found.tables[0].columns, found.tables[0].rows[2].cells, strict=True))
    assert found.tables[0].rows[2].label == "low-rank factors"
    assert by_title["OOD AUROC, tweets"] == "0.705 ± 0.007"
    assert found.tables[1].rows[0].cells[1] == "9"
    assert set(PAPER_SST2) == set(CONTESTANTS)


def test_sst2_takes_its_place_where_it_is_there(folder: Path) -> None:
    assert study(FULL).variant == MOVIES
    (folder / "sst2").mkdir()
    phrases = "".join(f"{'a lovely' if i % 2 else 'an awful'} film {i}\t{i % 2}\n" for i in range(200))
    for name in ("train.tsv", "dev.tsv"):
        (folder / "sst2" / name).write_text("sentence\tlabel\n" + phrases)
    (folder / "ag_news").mkdir()
    (folder / "ag_news" / "test.csv").write_text('"1","Title","Words"\n')
    assert study(FULL).variant == SST2
    assert study(SMALL).variant == MOVIES
    material = Material.load(dataclasses.replace(SMALL, sst2=True))
    assert material.data == SST2
    assert list(material.unknown) == ["ag_news", "tweets", "nyt_editorials", "amazon_reviews"]
    assert len(material.split.test) == 200


def test_search_changes_one_setting_at_a_time_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def judged(method: str, recipe: Recipe, *_: object) -> tuple[float, float]:
        tried.append((recipe.lr, recipe.beta, recipe.scale))
        assert recipe.lr is not None
        return abs(recipe.lr - 3e-3) + abs(recipe.beta - 1e-2) + recipe.scale, 0.5

    monkeypatch.setattr(sentiment_tuning, "_tried", judged)
    found = list(sentiment_tuning.search("low-rank", None, SMALL))  # type: ignore[arg-type]
    assert len(found) == len(tried) == 7
    assert tried[-1] == (3e-3, 1e-2, 0.03)
    assert min(found, key=lambda one: one[1])[0] == found[-1][0]
    assert len(list(sentiment_tuning.search("deterministic", None, SMALL))) == 3  # type: ignore[arg-type]
