from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito.training import NonFiniteError, fit, load_checkpoint
from dubito.training.numerics import gradient_norm


def bayesian() -> dubito.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return dubito.bayesianize(net, dubito.MeanField(), likelihood=dubito.Categorical())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(2, (6,), generator=generator))
        for _ in range(count)
    ]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def after(epochs: int, data: Any, **options: Any) -> dict[str, Tensor]:
    bayes = bayesian()
    fit(bayes, data, epochs=epochs, seed=0, diagnostics=False, **options)
    return state(bayes)


def assert_state(module: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


class Poisoned:
    """Good batches, until in one epoch one of them holds NaN."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.good, self.epoch, self.batch, self.passes = batches(4), epoch, batch, -1

    def __iter__(self) -> Any:
        self.passes += 1  # the first is fit's trial
        for i, (x, y) in enumerate(self.good):
            yield (x * float("nan"), y) if (self.passes, i) == (self.epoch, self.batch) else (x, y)


def test_nan_in_a_batch_names_the_step_and_goes_back_to_the_last_good_state(tmp_path: Path) -> None:
    bayes = bayesian()
    with pytest.raises(NonFiniteError, match=r"step 7 \(epoch 2\): the NLL .*not finite.*is kept") as caught:
        fit(bayes, Poisoned(2, 2), epochs=3, seed=0, n_data=24, checkpoint_dir=tmp_path, diagnostics=False)
    assert (caught.value.step, caught.value.epoch, caught.value.part) == (7, 2, "nll")
    expected = after(1, batches(4))
    assert_state(bayes, expected)
    kept = load_checkpoint(tmp_path / "last.safetensors")
    assert kept["position"]["step"] == 4
    assert all(torch.equal(value, expected[name]) for name, value in kept["weights"]["model"].items())
    assert all(p.grad is None for p in bayes.parameters())


def test_a_state_that_gives_nan_at_once_is_not_the_last_good_one() -> None:
    bayes = bayesian()
    with pytest.raises(NonFiniteError, match=r"step 9 .*after step 4") as caught:
        fit(bayes, Poisoned(3, 0), epochs=3, seed=0, n_data=24, diagnostics=False)
    assert caught.value.epoch == 3
    assert_state(bayes, after(1, batches(4)))


def test_an_infinite_loss_of_the_user_s_own() -> None:
    calls = 0

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(outputs, y) * (float("inf") if calls == 4 else 1.0)

    with pytest.raises(NonFiniteError, match=r"step 3 \(epoch 1\): the NLL is (inf|nan)") as caught:
        fit(bayesian(), batches(4), loss=loss, epochs=1, diagnostics=False)
    assert caught.value.part == "nll"


def test_an_infinite_kl_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    bayes = bayesian()
    whole, calls = type(bayes).kl, 0

    def kl(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        value: Tensor = whole(self, *args, **kwargs)
        return value * float("inf") if calls == 3 else value

    monkeypatch.setattr(type(bayes), "kl", kl)
    with pytest.raises(NonFiniteError, match=r"step 2 .*the KL is inf") as caught:
        fit(bayes, batches(4), epochs=1, diagnostics=False)
    assert caught.value.part == "kl"


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    bayes = bayesian()

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        zero = bayes.module[2].bias.sum() * 0.0  # the square root of 0 has a finite value and no finite slope
        return F.cross_entropy(outputs, y) + torch.sqrt(zero)

    before = state(bayes)
    with pytest.raises(NonFiniteError, match=r"step 1 .*gradient is not finite in module\.2\.bias") as caught:
        fit(bayes, batches(4), loss=loss, epochs=1, diagnostics=False)
    assert caught.value.part == "gradient"
    assert caught.value.parameters == ("module.2.bias",)
    assert_state(bayes, before)


def test_weights_blown_up_by_the_step_are_found_and_never_saved(tmp_path: Path) -> None:
    bayes = bayesian()
    before = state(bayes)
    with pytest.raises(NonFiniteError) as caught:
        fit(
            bayes, batches(4), epochs=2, diagnostics=False, checkpoint_dir=tmp_path, checkpoint_every=1,
            optimizer=lambda groups: torch.optim.SGD(groups, lr=3e38), loss=lambda o, y: 1e3 * o.square().sum(),
        )  # fmt: skip
    assert caught.value.parameters or caught.value.part
    assert all(bool(torch.isfinite(value).all()) for value in bayes.state_dict().values())
    assert_state(bayes, before)
    saved = tmp_path / "last.safetensors"
    assert not saved.exists() or all(
        bool(torch.isfinite(v).all()) for v in load_checkpoint(saved)["weights"]["model"].values()
    )


def test_validation_that_is_not_finite_stops_as_well() -> None:
    x, y = batches(1)[0]
    bayes = bayesian()
    before = state(bayes)
    with pytest.raises(
        NonFiniteError, match=r"step 2 \(epoch 1\): after it, the validation NLL has no value"
    ) as caught:
        fit(bayes, batches(2), [(x, y), (x * float("nan"), y)], epochs=1, diagnostics=False)
    assert caught.value.part == "nll"
    assert_state(bayes, before)


def test_ctrl_c_keeps_the_checkpoint_and_is_raised_on(tmp_path: Path) -> None:
    calls = 0

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:  # the trial, four steps, and the third of the second epoch
            raise KeyboardInterrupt
        return F.cross_entropy(outputs, y)

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(bayesian(), batches(4), loss=loss, epochs=3, checkpoint_dir=tmp_path, diagnostics=False)
    assert "resume=True" in "".join(caught.value.__notes__)
    assert load_checkpoint(tmp_path / "last.safetensors")["position"]["step"] == 4


def test_a_wrong_label_in_the_middle_is_not_taken_for_nan() -> None:
    data = batches(3)
    data[2] = (data[2][0], torch.full((6,), 9))
    with pytest.raises(ValueError, match="9") as caught:
        fit(bayesian(), data, epochs=1, diagnostics=False)
    assert not isinstance(caught.value, NonFiniteError)


def test_gradient_norm_is_that_of_all_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(gradient_norm(parameters)) == 5.0
    assert float(gradient_norm(parameters[2:])) == 0.0
