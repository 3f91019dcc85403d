"""The comparison at a size of seconds: rows, resuming, exams, targets, costs."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from dubito.data import CORRUPTIONS, DataSplit, Images
from dubito.experiments.ibvi import comparison
from dubito.experiments.ibvi.comparison import ComparisonSettings, Overhead, Rows, compare_ibvi, overhead
from dubito.experiments.ibvi.contestants import CONTESTANTS, NETWORKS, Task
from dubito.experiments.ibvi.exam import Material, Sizes, by_corruption, judge
from dubito.experiments.ibvi.markdown import markdown
from dubito.experiments.ibvi.training import Recipe, groups, loss_of, sgd, train, with_low_rank
from dubito.experiments.ibvi.verdict import averaged, picture, tables, targets
from dubito.training import NonFiniteError

NAMES = tuple(map(str, range(10)))


def split_of(seed: int, count: int = 60) -> DataSplit:
    """Images of ten bright bars, one a class, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = 0.2 * torch.rand(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 2 * label + 2 : 2 * label + 5] += 0.8
    data = Images(images.clamp(0, 1), labels, NAMES)
    return DataSplit.of("bars", data, data, data)


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.of(split_of(0), split_of(1), Sizes(50, 20, 30, 20, 20))


def tiny(methods: tuple[str, ...], networks: tuple[str, ...] = ("lenet5",)) -> ComparisonSettings:
    return ComparisonSettings(("mnist",), networks, methods, {"lenet5": 2, "resnet": 1}, 3)


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch, material: Material) -> list[str]:
    """Loads the bars in place of any data set, and remembers what was asked for."""
    asked: list[str] = []

    def load(data: str, sizes: Sizes, seed: int) -> Material:
        asked.append(data)
        return material

    monkeypatch.setattr(comparison, "load_material", load)
    return asked


@pytest.mark.parametrize("network", NETWORKS)
def test_every_method_gives_a_predictive_and_says_what_it_stores(network: str, material: Material) -> None:
    task = Task(NETWORKS[network], material.train, material.validation, epochs=1, samples=2)
    for name, (_, method) in CONTESTANTS.items():
        if name.startswith("laplace") and importlib.util.find_spec("laplace") is None:
            continue
        state = torch.get_rng_state()
        fitted = method(task)
        predictive = fitted.predict(material.test[0])
        assert torch.equal(state, torch.get_rng_state()), name
        assert predictive.probs.shape == (30, 10), name
        assert torch.isfinite(predictive.entropy).all(), name
        plain = sum(p.numel() for p in task.plain.parameters())
        assert fitted.stored >= plain, name
        if name == "ensemble":
            assert fitted.stored == 5 * plain


def test_post_hoc_methods_leave_the_shared_network_alone(material: Material) -> None:
    task = Task(NETWORKS["lenet5"], material.train, material.validation, epochs=1, samples=2)
    before = [p.detach().clone() for p in task.plain.parameters()]
    for name in ("temperature", "swag", "ensemble"):
        CONTESTANTS[name][1](task)
    assert all(torch.equal(a, b) for a, b in zip(before, task.plain.parameters(), strict=True))


def test_training_learns_and_repeats_itself(material: Material) -> None:
    x, y = material.train
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        net = NETWORKS["lenet5"].make()
        before = float(loss_of(net, 1)(x, y).detach())
        train(net, loss_of(net, 1), sgd(net.parameters(), 0.05), (x, y), 25, seed=0)
        losses.append(float(loss_of(net, 1)(x, y).detach()))
    assert losses[0] == losses[1]
    assert losses[0] < 0.5 * before


def test_a_diverged_training_says_so(material: Material) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    with pytest.raises(NonFiniteError, match="lower the learning rate"):
        train(net, loss_of(net, 1), sgd(net.parameters(), 1e38), material.train, 3, seed=0)


def test_only_the_named_layers_are_random_and_s_learns_slower_by_its_rank() -> None:
    bayes = with_low_rank(NETWORKS["resnet"].make(), ("conv1", "out"), Recipe(0.1, rank=4, scale=0.5))
    random = {slot.name for p in bayes.posteriors() for slot in p.slots}
    assert random == {"conv1.weight", "out.weight", "out.bias"}
    rates = {group["lr"] for group in groups(bayes, Recipe(0.1, rank=4))}
    assert rates == {0.1, 0.1 / 4}


def test_the_exam_averages_over_fifteen_corruptions(material: Material) -> None:
    torch.manual_seed(0)
    weight = torch.randn(784, 10)

    def predict(x: torch.Tensor) -> dubito.Predictive:
        return dubito.Categorical().predictive((x.flatten(1) @ weight / 50)[None])

    found, parts = judge(predict, material), by_corruption(predict, material)
    assert set(parts) == set(CORRUPTIONS)
    assert len(parts) == 15
    for name in ("error", "nll", "ece"):
        assert found[f"corrupted_{name}"] == pytest.approx(sum(p[name] for p in parts.values()) / 15)
    wrong = predict(material.test[0]).prediction != material.test[1]
    assert found["error"] == pytest.approx(float(wrong.double().mean()))


def test_rows_are_kept_and_taken_up_again_if_nothing_they_depend_on_has_changed(
    tmp_path: Path, synthetic: list[str]
) -> None:
    said: list[str] = []
    settings = tiny(("plain", "ibvi"))
    first = compare_ibvi(settings, tmp_path, said.append)
    assert [row["key"]["method"] for row in first] == ["plain", "ibvi"]
    assert json.loads((tmp_path / "mnist.json").read_text()) == first
    assert len(said) == 2
    assert synthetic == ["mnist"]
    again = compare_ibvi(settings, tmp_path)
    assert again == first
    assert synthetic == ["mnist"], "nothing had to be loaded"
    changed = compare_ibvi(dataclasses.replace(settings, samples=2), tmp_path)
    assert synthetic == ["mnist", "mnist"]
    assert len(json.loads((tmp_path / "mnist.json").read_text())) == len(changed) == 2


def test_a_missing_extra_leaves_a_note_and_the_other_methods(
    synthetic: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "laplace", None)
    said: list[str] = []
    rows = compare_ibvi(tiny(("plain", "laplace")), None, said.append)
    assert [row["key"]["method"] for row in rows] == ["plain"]
    assert any("laplace is left out" in line and "install-laplace" in line for line in said)


def row(method: str, data: str = "mnist", seconds: float = 10.0, **metrics: float) -> dict[str, object]:
    base = {"error": 0.01, "nll": 0.05, "ece": 0.02, "ood_auroc": 0.9}
    base |= {"corrupted_error": 0.4, "corrupted_nll": 2.0, "corrupted_ece": 0.2}
    return {
        "key": {"data": data, "network": "resnet", "method": method, "seed": 0},
        "metrics": base | metrics,
        "train_seconds": seconds,
        "stored_numbers": 100,
    }


def test_targets_are_judged_both_ways() -> None:
    better = {"nll": 0.04, "ece": 0.01, "corrupted_nll": 1.0, "corrupted_ece": 0.1}
    rows = [row("plain"), row("ensemble", corrupted_ece=0.15), row("ibvi", error=0.012, **better)]
    met = targets(rows, {"ibvi": Overhead(1.1, 0.1)})
    assert len(met) == 8
    assert all(met.values()), met
    rows = [row("plain"), row("ensemble", corrupted_ece=0.05), row("ibvi", error=0.02, corrupted_ece=0.3)]
    missed = targets(rows, {"ibvi": Overhead(1.2, 0.13)})
    assert not any(missed.values()), missed


def test_the_ensemble_target_wants_one_data_set_only() -> None:
    rows = [row("ensemble"), row("ibvi", corrupted_ece=0.3)]
    rows += [row("ensemble", "fashion-mnist"), row("ibvi", "fashion-mnist", corrupted_ece=0.1)]
    found = targets(rows, {})
    assert list(found.values()) == [True]
    assert "MNIST +10.0 points" in next(iter(found))


def test_tables_are_relative_to_plain_and_average_seeds() -> None:
    rows = [row("plain"), row("ibvi", seconds=12.0), row("ibvi", seconds=14.0, error=0.03)]
    (table,) = tables(rows)
    assert [r.label for r in table.rows] == ["plain", "IBVI first+last"]
    assert table.rows[1].cells[0] == "2.00"
    assert table.rows[1].cells[-2:] == ("1.30×", "1.00×")
    assert averaged(rows)["mnist", "resnet", "ibvi"]["error"] == pytest.approx(0.02)
    assert picture(rows, "resnet").figure.axes


def test_added_memory_is_counted_exactly() -> None:
    architecture = NETWORKS["resnet"]
    found = overhead(architecture, architecture.first_last, turns=2)
    sizes = {name: p.numel() for name, p in architecture.make().named_parameters()}
    random = sizes["conv1.weight"] + sizes["out.weight"] + sizes["out.bias"]
    assert found.added_memory == pytest.approx(architecture.ibvi.rank * random / sum(sizes.values()))
    assert found.step_ratio > 0


def test_a_damaged_row_is_replaced_not_doubled(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "x.json")
    key = {"data": "mnist", "network": "lenet5", "method": "plain", "seed": 0, "epochs": 1}
    rows.add(key, {"metrics": {}})
    rows.add({**key, "epochs": 2}, {"metrics": {}})
    assert [r["key"]["epochs"] for r in Rows(tmp_path / "x.json").rows] == [2]
    assert Rows(tmp_path / "x.json").find(key) is None


def test_markdown_has_a_line_a_method_and_every_target() -> None:
    rows = [row("plain"), row("ibvi", nll=0.04)]
    lines = markdown(rows).splitlines()
    assert lines[0] == "**MNIST, small ResNet**"
    assert lines[5].startswith("| IBVI first+last | 1.00 | 0.040 |")
    assert sum(line.startswith(("- met", "- **missed**")) for line in lines) == len(targets(rows, {}))
