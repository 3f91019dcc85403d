"""The comparison of one pass with many on made data: methods, resumption, agreement, tables, targets."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dubito.data import Images
from dubito.experiments.cvp import comparison, contestants
from dubito.experiments.cvp.comparison import RECIPES, CvpSettings, chosen_spread, measure
from dubito.experiments.cvp.contestants import CONTESTANTS, Bench, Budget
from dubito.experiments.cvp.exam import agreement, packed, scores, unpacked
from dubito.experiments.cvp.markdown import main, markdown
from dubito.experiments.cvp.material import Material, Sizes, paired
from dubito.experiments.cvp.networks import PairNetwork, SmallResNet, SmallViT
from dubito.experiments.cvp.parts import outcome
from dubito.experiments.cvp.training import Recipe, drawn_logits, train
from dubito.experiments.cvp.verdict import cost_of, overall, tables, targets
from dubito.moments.moments import Moments
from dubito.predictive import Predictive

FAST = Recipe(warm=2, warm_lr=1e-2, epochs=2)
SMALL = CvpSettings(
    sizes=Sizes(200, 60, 80, 40),
    recipes=dict.fromkeys(RECIPES, FAST),
    budget=Budget(draws=12, matching=6, nll_steps=2, scalar_steps=2),
    compile_too=False,
)


def made(part: str, sizes: Sizes, seed: int) -> Material:
    """Two noisy blobs on a plane; unknown ones lie elsewhere. The test part does not depend on the seed."""

    def some(count: int | None, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(2, (count or 100,), generator=generator)
        return torch.randn(len(labels), 4, generator=generator) + labels[:, None], labels

    unknown = some(sizes.unknown, 3)[0] - 3
    return Material(
        some(sizes.train, 10 + seed), some(sizes.validation, 20 + seed), some(sizes.test, 2), unknown
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part learns the blobs by a small perceptron."""

    def network(vocabulary: int, length: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))

    monkeypatch.setattr(contestants, "BATCH", 30)  # so that the test examples come in several
    monkeypatch.setattr(comparison, "load_material", made)
    monkeypatch.setattr(comparison, "NETWORKS", dict.fromkeys(RECIPES, network))


def test_all_methods_are_measured_and_taken_up(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = measure(["vit"], SMALL, (0,), tmp_path)
    assert [row["key"]["method"] for row in rows] == [*CONTESTANTS, "costs"]
    found = {row["key"]["method"]: row for row in rows}
    assert found["mean"]["metrics"]["accuracy"] > 0.6
    # the first-order rules leave the mean network's logits as they are
    assert found["streamlining"]["metrics"]["shift_r2"] == pytest.approx(0.0, abs=1e-4)
    assert found["mc-400"]["metrics"]["shift_r2"] == 1.0
    assert found["mc-4"]["fitted"]["sets"] == 3
    costs = found["costs"]["costs"]
    assert costs["mean"] == 1.0
    assert cost_of(rows, "vit", "mc-16") == pytest.approx(16 * costs["draw"])
    assert cost_of(rows, "vit", "ours", compiled=True) is None
    # a posterior that is there is not trained again, and gives the same rows
    other = dataclasses.replace(SMALL, methods=("mc-4", "paper"))
    monkeypatch.setattr(comparison, "train", lambda *_: pytest.fail("trained again"))
    assert measure(["vit"], other, (0,), tmp_path) == [found["mc-4"], found["paper"], found["costs"]]
    (tmp_path / "vit.json").unlink()
    again = measure(["vit"], other, (0,), tmp_path)
    for row in again[:-1]:
        assert row["metrics"] == pytest.approx(found[row["key"]["method"]]["metrics"], rel=1e-4, abs=1e-5)
    monkeypatch.setattr(Bench, "drawn", lambda self: pytest.fail("drawn again"))
    (tmp_path / "vit.json").unlink()
    alone = dataclasses.replace(SMALL, methods=("paper",))
    measure(["vit"], alone, (0,), tmp_path)  # the draws' moments were kept
    # another setting is another row
    wider = dataclasses.replace(other, sizes=Sizes(100, 60, 80, 40))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        measure(["vit"], wider, (0,), tmp_path)


def test_tables_targets_and_words(small: None, tmp_path: Path) -> None:
    methods = ("mean", "mc-400", "streamlining-scale", "paper-nll", "cvp", "cvp-matched-nll")
    settings = dataclasses.replace(SMALL, methods=(*methods, "no-moments", "no-norm", "ours"))
    measured = measure(["vit"], settings, (0,))
    rows = [{**row, "key": {**row["key"], "data": part}} for part in RECIPES for row in measured]
    quality, moments, ablation = tables(rows, "bert")
    assert quality.rows[0].label == "mean network"
    assert len(quality.rows) == 7  # the ablation has a table of its own
    assert len(ablation.rows) == 4
    assert all("400" not in row.label for row in moments.rows)
    made_outcome = outcome([r for r in rows if r["key"]["data"] == "bert"], "bert", settings, (0,), rows)
    assert any("ours takes at most 3.5 eager passes" in what for what in made_outcome.targets)
    assert len(made_outcome.pictures) == 1
    assert "confidence" not in made_outcome.values["rows"][0]
    whole = overall(rows)
    assert len(whole) == 2
    assert overall([r for r in rows if r["key"]["data"] != "vit"]) == {}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "all.json").write_text(json.dumps(rows))
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nwords\n\n## Results\n\nold\n")
    main(str(tmp_path / "rows"), str(page))
    text = page.read_text()
    assert text == "# Title\n\nwords\n\n## Results\n\n" + markdown(rows)
    assert text.count("**met**") == 0
    assert text.count("(difference in AURC × 100") == 12
    assert "### All four" in text


def test_clear_differences_are_targets_and_open_ones_are_not(small: None) -> None:
    settings = dataclasses.replace(SMALL, methods=("mean", "streamlining-scale", "paper-nll"))
    rows = measure(["pairs"], settings, (0,))
    wrong = torch.zeros(80, dtype=torch.uint8)
    wrong[:20] = 1
    rows.pop()  # of costs
    for row in rows:
        knows = row["key"]["method"] == "paper-nll"
        row["wrong"] = packed(wrong)
        row["confidence"] = packed(1.0 - wrong if knows else torch.zeros(80))
    assert list(targets(rows, "pairs").values()) == [True, True]
    for row in rows:
        row["confidence"] = packed(torch.zeros(80))
    assert targets(rows, "pairs") == {}


def test_spread_with_the_least_validation_loss_is_chosen(small: None) -> None:
    material = made("vit", SMALL.sizes, 0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    bayes = train(network, material.train, FAST, 0)
    before = bayes.snapshot()
    spread, tried = chosen_spread(bayes, material, 0)
    assert tried[str(spread)] == min(value for name, value in tried.items() if name != "0")
    assert float(bayes.wasserstein(before).detach()) == 0.0  # what was tried leaves the posterior alone


def test_first_draws_do_not_depend_on_how_many_there_are(small: None) -> None:
    material = made("vit", SMALL.sizes, 0)
    torch.manual_seed(0)
    bayes = train(nn.Sequential(nn.Linear(4, 2)), material.train, FAST, 0)
    (few,) = drawn_logits(bayes, (material.test[0],), 3, 5, batch=7)
    many, elsewhere = drawn_logits(bayes, (material.test[0], material.unknown), 30, 5)
    torch.testing.assert_close(few, many[:3])
    assert elsewhere.shape == (30, 40, 2)
    assert not torch.equal(many[0], many[1])


def test_agreement_by_hand() -> None:
    at_mean = torch.zeros(2, 2)
    reference = Moments(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    half = Moments(reference.mean / 2, 0.5 * reference.variance)
    found = agreement(half, reference, at_mean)
    assert found == pytest.approx({"shift_r2": 0.75, "variance_ratio": 0.5, "variance_correlation": 1.0})


def test_scores_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.45, 0.55]])
    test = Predictive.from_moments("categorical", probs)
    unknown = Predictive.from_moments("categorical", torch.tensor([[0.5, 0.5]]))
    found = scores(test, torch.tensor([0, 1, 0, 0]), unknown)
    assert found["accuracy"] == 0.75
    assert found["c05"] == found["c1"] == 75.0
    assert found["ood_auroc"] == 1.0
    assert found["aurc"] == pytest.approx(100 * (0 + 0 + 0.25 / 2) / 4)


def test_numbers_survive_packing() -> None:
    values = torch.randn(50)
    assert torch.equal(unpacked(packed(values), torch.float32), values)


def test_pairs_agree_every_second_time_and_are_deterministic() -> None:
    labels = torch.arange(40) % 4
    images = Images(torch.zeros(40, 1, 28, 28), labels, ("a", "b", "c", "d"))
    images.images[:] = labels[:, None, None, None] / 4
    x, same = paired(images, 200, 0)
    assert x.shape == (200, 1, 28, 56)
    assert same.float().mean() == 0.5
    level = x.unflatten(-1, (2, 28))[..., 6:22, :, 6:22].mean((1, 2, 4))  # the middle survives turning
    agree = (
        level[:, 0] - level[:, 1]
    ).abs() < 0.125  # a quarter apart where classes differ; noise of 0.3 / 16 each
    assert torch.equal(agree.long(), same)
    assert torch.equal(paired(images, 200, 0)[0], x)
    assert not torch.equal(paired(images, 200, 1)[0], x)


@pytest.mark.parametrize(
    ("network", "shape"),
    [(SmallResNet(4), (1, 28, 28)), (SmallViT(8, 1), (1, 28, 28)), (PairNetwork(4, 8), (1, 28, 56))],
    ids=["resnet", "vit", "pairs"],
)
def test_networks_are_trained_by_ivon_and_propagate(network: nn.Module, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, *shape, generator=generator), torch.randint(2, (40,), generator=generator)
    bayes = train(network, (x, y), Recipe(warm=1, epochs=1), 0)
    material = Material((x, y), (x[:20], y[:20]), (x[20:], y[20:]), x[:10])
    answer = CONTESTANTS["cvp-matched"].answer(Bench(bayes, material, 0, Budget(draws=4, matching=4)))
    assert answer.moments is not None
    assert bool((answer.moments.variance > 0).all())
    assert answer.test[0].probs.shape == (20, bayes(x[:1]).shape[-1])
