"""What `bayesianize` refuses or speaks of, and what it keeps together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import LowRankFactors, MeanField, Point


def test_a_bayesian_module_inside_is_refused() -> None:
    inner = dubito.bayesianize(nn.Linear(3, 3), MeanField())
    with pytest.raises(TypeError, match=r"BayesianModule at '0'.*KL would be lost"):
        dubito.bayesianize(nn.Sequential(inner, nn.Linear(3, 2)), {"1": MeanField()})


@pytest.mark.parametrize(
    "value", [torch.arange(3), torch.ones(3, dtype=torch.complex64)], ids=["integers", "complex"]
)
def test_random_weights_are_real_numbers(value: Tensor) -> None:
    module = nn.Linear(3, 2)
    module.register_parameter("a", nn.Parameter(value, requires_grad=False))
    with pytest.raises(
        TypeError, match=r"parameter 'a' holds torch\.\w+, but random weights are real numbers"
    ):
        dubito.bayesianize(module, MeanField())
    bayes = dubito.bayesianize(module, {"rest": MeanField(), "a": Point()})
    assert set(bayes.posterior) == {"weight", "bias"}


@pytest.mark.parametrize("family", [MeanField(), LowRankFactors(1, init="svd")], ids=str)
def test_a_parameter_kept_in_a_python_list_is_spoken_of(family: dubito.Family) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.layers = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.layers[0].mT

    with pytest.warns(
        dubito.DubitoWarning, match=r"weight is also kept in 'layers', a list.*nn.ParameterList"
    ):
        dubito.bayesianize(Listed(), family)


def test_ties_outlive_loading_by_assignment() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embedding(x))

    bayes, x = dubito.bayesianize(Tied(), MeanField()), torch.tensor([[1, 2]])
    saved = {name: value.clone() for name, value in bayes.state_dict().items()}
    copy.deepcopy(bayes).load_state_dict(saved, assign=True)
    bayes.load_state_dict(saved, assign=True)
    assert bayes.module.embedding.weight is bayes.module.out.weight
    optimizer = torch.optim.SGD(bayes.parameters(), lr=0.5)
    bayes(x).square().sum().backward()
    optimizer.step()
    bayes.eval()
    assert torch.equal(bayes(x), bayes.merge()(x))
