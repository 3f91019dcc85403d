"""What can be found wrong before training is found there, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from dubito.training import fit


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from [(torch.randn(4), torch.tensor(0))] * 8


XY = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
LABELS = TensorDataset(torch.randn(8, 4), torch.full((8,), 2))
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "empty loader": ({"train": []}, ValueError, "train is empty"),
    "dropped batch": ({"train": DataLoader(XY, 9, drop_last=True)}, ValueError, "drop_last"),
    "empty validation": ({"validation": []}, ValueError, "validation is empty"),
    "no length": ({"train": DataLoader(Stream(), 4)}, ValueError, "n_data is missing"),
    "no likelihood": ({"likelihood": None}, ValueError, "no likelihood"),
    "two": ({"loss": F.cross_entropy}, ValueError, "both given"),
    "class": ({"likelihood": F.cross_entropy}, TypeError, "goes to loss="),
    "loss class": (
        {"likelihood": None, "loss": nn.CrossEntropyLoss},
        TypeError,
        r"instance, CrossEntropyLoss\(\)",
    ),
    "loss no function": ({"likelihood": None, "loss": 3}, TypeError, "loss must be a function"),
    "no scalar": (
        {"likelihood": None, "loss": lambda o, y: F.cross_entropy(o, y, reduction="none")},
        ValueError,
        r"scalar, the mean over the batch, got shape \(4,\)",
    ),
    "no tensor": ({"likelihood": None, "loss": lambda o, y: 3.0}, TypeError, "loss must return a tensor"),
    "label": ({"train": DataLoader(LABELS, 4)}, ValueError, "2"),
    "NaN": (
        {"train": [(torch.full((4, 4), float("nan")), torch.zeros(4).long())]},
        ValueError,
        r"first batch of train has no value .*not finite: outputs.*drop or impute",
    ),
    "validation label": ({"validation": DataLoader(LABELS, 4)}, ValueError, "2"),
    "validation NaN": (
        {"validation": [(torch.full((4, 4), float("nan")), torch.zeros(4).long())]},
        ValueError,
        "first batch of validation has no value",
    ),
    "tensor": ({"train": XY.tensors[0]}, TypeError, "pass DataLoader"),
    "patience": ({"patience": 2}, ValueError, "patience needs validation="),
    "no batches": ({"train": [torch.randn(4, 4)]}, TypeError, "inputs, target"),
    "closure": ({"optimizer": "lbfgs"}, ValueError, "LBFGS"),
    "foreign": ({"optimizer": "foreign"}, ValueError, "none of the model's trainable parameters"),
    "no optimizer": ({"optimizer": 3}, TypeError, "optimizer must be"),
    "infinite KL": ({"family": dubito.LowRankCovariance(rank=2)}, dubito.CapabilityError, "expected loss"),
    "shape": (
        {"train": [(torch.randn(4, 5), torch.zeros(4).long())]},
        RuntimeError,
        "shapes cannot be multiplied",
    ),
    "option": ({"samples": 0}, ValueError, "samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_and_nothing_has_changed(case: str) -> None:
    options, error, match = REFUSED[case]
    given = {"train": DataLoader(XY, 4, shuffle=True), "likelihood": dubito.Categorical()} | options
    bayes = dubito.bayesianize(network(), given.pop("family", dubito.MeanField()))
    if given.get("optimizer") == "lbfgs":
        given["optimizer"] = torch.optim.LBFGS(list(bayes.parameters()))
    if given.get("optimizer") == "foreign":
        given["optimizer"] = torch.optim.SGD(network().parameters(), lr=0.1)
    before = {name: value.clone() for name, value in bayes.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(error, match=match):
        fit(bayes, seed=3, **given)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in bayes.state_dict().items())
    assert bayes.likelihood is None
    assert all(p.grad is None for p in bayes.parameters())
    assert all(module.training for module in bayes.modules())


def test_the_model_s_likelihood_and_another_one_are_refused() -> None:
    bayes = dubito.bayesianize(network(), dubito.MeanField(), likelihood=dubito.Categorical())
    with pytest.raises(ValueError, match="already has Categorical"):
        fit(bayes, DataLoader(XY, 4), likelihood=dubito.Bernoulli())
