"""A run stopped anywhere and taken up again ends bit for bit where an uninterrupted one does."""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito.bayesian import BayesianModule
from dubito.training import CheckpointError, FitResult, fit, load_checkpoint


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are random each time they are fetched, by all three global generators."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), index / 22.0) + 0.1 * torch.randn(4)
        return x + random.gauss(0, 0.1) + float(np.random.normal(0, 0.1)), torch.tensor(index % 3)


class Stop(Exception):
    pass


class StoppingLoss:
    """Cross entropy that stops the run at its n-th call after the first (which is fit's trial)."""

    def __init__(self, calls: int | None) -> None:
        self.left = calls

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.left is not None and torch.is_grad_enabled():
            self.left -= 1
            if self.left < 0:
                raise Stop
        return nn.functional.cross_entropy(outputs, target)


FAMILIES: dict[str, Callable[[], Any]] = {
    "mean field": dubito.MeanField,
    "local": lambda: dubito.MeanField(estimator="local"),
    "factors": lambda: dubito.LowRankFactors(rank=1, init="random"),
    "covariance": lambda: dubito.LowRankCovariance(rank=3),
    "plain": lambda: None,
}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3)
    )  # fmt: skip
    chosen = FAMILIES[family]()
    return net if chosen is None else dubito.bayesianize(net, {"0": chosen, "4": chosen})


def loader(own_generator: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return DataLoader(Augmented(), 4, shuffle=True, generator=generator)


def train(
    family: str, folder: Path, stop: int | None = None, own_generator: bool = False, **options: Any
) -> tuple[nn.Module, FitResult | None]:
    model = make(family)
    validation = [(torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
    settings: dict[str, Any] = {
        "epochs": 3, "seed": 11, "diagnostics": False, "restore_best": False, "resume": True, "n_data": 22,
        "checkpoint_dir": folder,
        "objective": "expected_loss" if family == "covariance" else "elbo",
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18),
        "scheduler_interval": "step", "checkpoint_every": 1,
    } | options  # fmt: skip
    result = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Stop):
            result = fit(model, loader(own_generator), validation, loss=StoppingLoss(stop), **settings)
    return model, result


def assert_same(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def figures(result: FitResult | None) -> list[tuple[Any, ...]]:
    assert result is not None
    return [(r.epoch, r.step, r.loss, r.nll, r.kl, r.lr, r.validation_nll) for r in result.history]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stop", [1, 6, 10])
def test_a_run_stopped_at_any_step_and_resumed_ends_bit_identical(
    tmp_path: Path, family: str, stop: int
) -> None:
    whole, expected = train(family, tmp_path / "whole")
    stopped, nothing = train(family, tmp_path / "parts", stop=stop)
    assert nothing is None
    assert any(not torch.equal(a, b) for a, b in zip(stopped.parameters(), whole.parameters(), strict=True))
    resumed, result = train(family, tmp_path / "parts", seed=999)
    assert result is not None
    assert result.resumed_from == stop
    assert_same(resumed, whole)
    assert figures(result) == figures(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_every": None},  # back to the end of the epoch before
        {"checkpoint_every": 2, "accumulation": 2},
        {"own_generator": True},
        {"samples": 3},
        {"optimizer": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9), "clip_norm": 0.5},
        {"patience": 1, "restore_best": True, "lr": 0.3},
        {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau, "scheduler_interval": "epoch"},
        {"beta": dubito.objectives.KLWarmup(10)},
        {"validation_samples": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_so_it_does_whatever_the_settings(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, expected = train("mean field", tmp_path / "whole", **options)
    train("mean field", tmp_path / "parts", stop=11, **options)
    resumed, result = train("mean field", tmp_path / "parts", **options)
    assert result is not None
    assert result.resumed_from
    assert_same(resumed, whole)
    assert figures(result) == figures(expected)


def test_workers_with_random_augmentation_resume_exactly(tmp_path: Path) -> None:
    def run(folder: Path, stop: int | None) -> nn.Module:
        model = make("mean field")
        data = DataLoader(Augmented(), 4, shuffle=True, num_workers=1)
        with contextlib.suppress(Stop):
            fit(
                model, data, loss=StoppingLoss(stop), epochs=2, seed=4, checkpoint_dir=folder, checkpoint_every=1,
                resume=True, diagnostics=False,
            )  # fmt: skip
        return model

    whole = run(tmp_path / "whole", None)
    run(tmp_path / "parts", 3)
    assert_same(run(tmp_path / "parts", None), whole)


def test_it_may_be_stopped_again_and_again(tmp_path: Path) -> None:
    whole, expected = train("mean field", tmp_path / "whole")
    for stop in (2, 1, 5, 4):
        train("mean field", tmp_path / "parts", stop=stop)
    resumed, result = train("mean field", tmp_path / "parts")
    assert result is not None
    assert result.resumed_from == 12
    assert_same(resumed, whole)
    assert figures(result) == figures(expected)


def test_a_finished_run_can_be_lengthened(tmp_path: Path) -> None:
    whole, _ = train("mean field", tmp_path / "whole", epochs=3)
    train("mean field", tmp_path / "parts", epochs=1)
    resumed, _ = train("mean field", tmp_path / "parts", epochs=3)
    assert_same(resumed, whole)
    again, result = train("mean field", tmp_path / "parts", epochs=3)
    assert result is not None
    assert len(result.history) == 3
    assert_same(again, whole)


def test_a_checkpoint_can_be_carried_to_another_folder(tmp_path: Path) -> None:
    whole, _ = train("mean field", tmp_path / "whole", lr=0.3)
    train("mean field", tmp_path / "parts", stop=14, lr=0.3)
    last = tmp_path / "parts" / "last.safetensors"
    resumed, _ = train("mean field", tmp_path / "new", resume=last, lr=0.3)
    assert_same(resumed, whole)
    best = load_checkpoint(tmp_path / "new" / "best.safetensors")
    assert best["epoch"] is not None


def test_a_standardised_target_is_resumed_with_its_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    data = TensorDataset(x, 100 + 30 * x[:, :1])

    def run(folder: Path, epochs: int) -> BayesianModule:
        torch.manual_seed(1)
        bayes = dubito.bayesianize(
            nn.Linear(2, 1), dubito.MeanField(), likelihood=dubito.Gaussian(0.1, learned=True)
        )
        fit(
            bayes, DataLoader(data, 10, shuffle=True), epochs=epochs, lr=0.05, standardize_targets=True, seed=2,
            checkpoint_dir=folder, resume=True, diagnostics=False,
        )  # fmt: skip
        return bayes

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4)
    assert_same(resumed, whole)
    assert float(resumed.target_scale) == pytest.approx(30 * float(x[:, 0].std(unbiased=False)), rel=1e-4)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    train("mean field", tmp_path, epochs=1)
    before = (tmp_path / "last.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="resume=True"):
        train("mean field", tmp_path, epochs=1, resume=False)
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    with pytest.raises(FileExistsError, match="already holds a run"):
        train("mean field", tmp_path, epochs=1, resume=other)
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    train("mean field", tmp_path, epochs=1)
    torch.manual_seed(3)
    other = dubito.bayesianize(nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)), dubito.MeanField())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    data = loader()
    with pytest.raises(CheckpointError, match=r"not of this model: .*is missing"):
        fit(other, data, loss=nn.functional.cross_entropy, epochs=2, checkpoint_dir=tmp_path, resume=True)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        fit(other, data, loss=nn.functional.cross_entropy, resume=tmp_path / "nowhere")


def test_settings_that_differ_are_said(tmp_path: Path) -> None:
    model = make("mean field")
    fit(model, loader(), loss=StoppingLoss(None), epochs=1, checkpoint_dir=tmp_path, diagnostics=False)
    with pytest.warns(dubito.DubitoWarning, match=r"samples was 1, now 2.*beta was 1.0, now 0.5"):
        fit(
            model, loader(), loss=StoppingLoss(None), epochs=2, checkpoint_dir=tmp_path, resume=True, samples=2,
            beta=0.5, diagnostics=False,
        )  # fmt: skip


def test_another_optimizer_begins_anew(tmp_path: Path) -> None:
    model = make("mean field")
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "diagnostics": False}
    fit(model, loader(), loss=StoppingLoss(None), epochs=1, **options)
    with pytest.warns(dubito.DubitoWarning, match=r"was 'Adam', now 'SGD'.*of another kind, begins anew"):
        result = fit(
            model, loader(), loss=StoppingLoss(None), epochs=2, resume=True,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9), **options,
        )  # fmt: skip
    assert [record.epoch for record in result.history] == [1, 2]


def test_an_iterator_that_ends_early_is_no_endless_loop() -> None:
    class Once:
        def __init__(self) -> None:
            self.times = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.times += 1
            if self.times <= 2:  # the trial batch and the first epoch
                yield torch.randn(4, 4), torch.tensor([0, 1, 2, 0])

    with pytest.raises(ValueError, match="no batches this epoch"):
        fit(make("mean field"), Once(), loss=StoppingLoss(None), epochs=2, n_data=4, diagnostics=False)
