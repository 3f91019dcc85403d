import json
import math
from types import MappingProxyType

import pytest
import torch

from dubito.data import DATASETS, DataSplit, UnknownDataError, letters, split_images
from dubito.experiments import METHODS, Job, Method, UnknownMethodError
from dubito.experiments import methods as methods_module
from dubito.experiments.compare import Comparison, compare
from dubito.experiments.compare_report import report, table
from dubito.experiments.networks import small_cnn


def tiny_split(seed: int = 0) -> DataSplit:
    """Letters as data: ten classes, real strokes, nothing to install."""
    return split_images("tiny", letters(200, 8, seed=100), (120, 20, 60), seed)


@pytest.fixture(scope="module")
def finished() -> Comparison:
    return compare(tiny_split(), epochs=2, samples=3, seeds=[3])


def test_every_method_runs_and_is_measured(finished):
    assert finished.complete
    assert finished.finished == tuple(METHODS)
    for run in finished.runs:
        assert all(math.isfinite(value) for value in run.metrics.values()), run
        assert 0 <= run.metrics["accuracy"] <= 1
        assert run.metrics["train_seconds"] > 0
        assert run.judgement.probs.shape == (60, 10)
        assert torch.allclose(run.judgement.probs.sum(-1), torch.ones(60), atol=1e-5)


def test_parameters_are_counted(finished):
    plain = sum(p.numel() for p in small_cnn((8, 8), 10).parameters())
    count = {run.method: run.metrics["parameters"] for run in finished.runs}
    assert count["deterministic"] == plain
    assert count["mean-field"] == 2 * plain
    first_and_last = 8 * 9 + 8 + 64 * 10 + 10
    assert count["low-rank-covariance"] == plain + 8 * first_and_last
    assert count["low-rank-factors"] < count["mean-field"]


def test_times_are_relative_to_the_deterministic_network_of_the_same_seed(finished):
    assert finished.values("deterministic", "train_seconds", relative=True) == [1.0]
    (ratio,) = finished.values("mean-field", "train_seconds", relative=True)
    seconds = {run.method: run.metrics["train_seconds"] for run in finished.runs}
    assert ratio == seconds["mean-field"] / seconds["deterministic"]


def test_same_seed_same_numbers_and_the_callers_randomness_is_left_alone(finished):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = compare(tiny_split(), ["mean-field", "low-rank-covariance"], epochs=2, samples=3, seeds=[3])
    assert torch.equal(state, torch.get_rng_state())
    for run in again.runs:
        (before,) = finished.runs_of(run.method)
        assert torch.equal(run.judgement.probs, before.judgement.probs)


@pytest.fixture
def spies(monkeypatch):
    """Two methods that note their job and hand back an untrained network."""
    jobs: list[tuple[Job, dict[str, torch.Tensor]]] = []

    def train(job: Job):
        jobs.append((job, {k: v.clone() for k, v in job.network.state_dict().items()}))
        with torch.no_grad():
            for p in job.network.parameters():
                p.add_(1.0)
        torch.rand(7)
        return methods_module.Trained(
            methods_module._plain_predictor(job.network), parameters=1, device=torch.device("cpu")
        )

    table_ = {name: Method(name, "spy", train) for name in ("deterministic", "one", "two")}
    monkeypatch.setattr("dubito.experiments.compare.METHODS", MappingProxyType(table_))
    monkeypatch.setattr("dubito.experiments.methods.METHODS", MappingProxyType(table_))
    monkeypatch.setattr("dubito.experiments.compare_report.METHODS", MappingProxyType(table_))
    return jobs


def test_all_methods_start_from_the_same_weights_and_seeds_differ(spies):
    compare(tiny_split(), ["one", "two"], epochs=1, seeds=2)
    _, *rest = spies  # the first is the warm-up
    weights = {(job.seed, i % 2): state["hidden.weight"] for i, (job, state) in enumerate(rest)}
    assert torch.equal(weights[0, 0], weights[0, 1])
    assert torch.equal(weights[1, 0], weights[1, 1])
    assert not torch.equal(weights[0, 0], weights[1, 0])


@pytest.mark.parametrize("name", METHODS)
def test_t36_test_images_and_letters_take_no_part_in_training(name):
    split = tiny_split()
    darker = split.test.images * 0.2
    other = DataSplit(
        split.name, split.train, split.validation,
        type(split.test)(darker, split.test.labels.flip(0), split.test.class_names), split.mean, split.sd,
    )  # fmt: skip
    x = split.standardise(split.validation.images)
    predictions = []
    for one in (split, other):
        torch.manual_seed(0)
        job = Job(small_cnn((8, 8), 10), one, epochs=1, samples=2, seed=0)
        predictions.append(METHODS[name].train(job).predict(x).probs)
    assert torch.equal(*predictions)


def test_unknown_names_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("dubito.experiments.compare.load_dataset", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UnknownMethodError) as caught:
        compare(methods=["deterministic", "means-field"])
    assert all(name in str(caught.value) for name in METHODS)
    with pytest.raises(UnknownDataError) as refused:
        compare("mnist5k")
    assert all(name in str(refused.value) for name in DATASETS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0}, {"samples": 0}, {"seeds": 0}, {"seeds": []}, {"seeds": [1, 1]}, {"methods": []},
        {"methods": ["deterministic", "deterministic"]}, {"epochs": True},
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        compare(tiny_split(), **wrong)


def test_what_is_finished_survives_an_interrupt(spies):
    kept: list[Comparison] = []

    def stop(comparison: Comparison, method: str, seed: int) -> None:
        if len(comparison.runs) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tiny_split(), epochs=1, seeds=2, on_start=stop, on_run=kept.append)
    comparison = kept[-1]
    assert len(comparison.runs) == 3
    assert not comparison.complete
    assert any("interrupted" in text for text in report(comparison).lead)
    assert json.loads(json.dumps(comparison.as_dict()))["complete"] is False


def test_as_dict_is_json_with_means_and_spread(spies):
    result = json.loads(json.dumps(compare(tiny_split(), epochs=1, seeds=2).as_dict(), allow_nan=False))
    values = [run["metrics"]["nll"] for run in result["runs"] if run["method"] == "one"]
    summary = result["summary"]["one"]["nll"]
    assert summary["mean"] == pytest.approx(sum(values) / 2)
    assert summary["sd"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert set(result["runs"][0]["corrupted_accuracy_by_corruption"]) >= {"gaussian_noise", "rotation"}


def test_table_says_mean_and_spread(spies):
    comparison = compare(tiny_split(), epochs=1, seeds=2)
    sheet = table(comparison)
    assert sheet.columns == ("deterministic", "one", "two")
    cells = {row.label: row.cells for row in sheet.rows}
    values = comparison.values("one", "nll")
    assert (
        cells["NLL ↓"][1]
        == f"{sum(values) / 2:.3f} ±\N{NO-BREAK SPACE}{abs(values[0] - values[1]) / 2**0.5:.3f}"
    )
    assert cells["Training time"][0] == "1.00\N{NO-BREAK SPACE}×"


def test_without_the_reference_times_are_seconds(spies):
    comparison = compare(tiny_split(), ["one"], epochs=1)
    cells = {row.label: row.cells for row in table(comparison).rows}
    assert cells["Training time"][0].endswith("s")
    assert "one seed" in table(comparison).caption
