"""Parameter groups: every trainable tensor once, spread out of decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import LowRankCovariance, LowRankFactors, MeanField, Point, WeightPrior


class LearnedScale(WeightPrior):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        normal = torch.distributions.Normal(0.0, self.log_scale.exp())
        return torch.stack([normal.log_prob(w).sum() for w in weights.values()]).sum()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2))


def test_all_kinds_together() -> None:
    families = {
        "0": MeanField(prior=LearnedScale()),
        "2": LowRankCovariance(2),
        "3.weight": LowRankFactors(1, init="svd"),
        "3.bias": Point(),
    }
    bayes = dubito.bayesianize(network(), families, likelihood=dubito.Gaussian(learned=True))
    weights, spread = dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.01)
    assert (weights["name"], weights["lr"], weights["weight_decay"]) == ("weights", 0.1, 0.01)
    assert (spread["name"], spread["lr"], spread["weight_decay"]) == ("spread", 0.1, 0.0)
    names = {id(p): n for n, p in bayes.named_parameters()}
    decayed = [names[id(p)] for p in weights["params"]]
    kept_out = [names[id(p)] for p in spread["params"]]
    assert sorted(decayed + kept_out) == sorted(names.values())
    assert len(set(decayed + kept_out)) == len(decayed + kept_out)
    assert sum("spread" in n or "log_sigma" in n for n in kept_out) == 4
    assert any("log_scale" in n for n in kept_out), "a learned prior is not decayed"
    assert any(n.startswith("likelihood") for n in kept_out), "nor is the noise"
    assert any("factors" in n for n in kept_out)
    assert not any("spread" in n or "log_sigma" in n or "factors" in n for n in decayed)
    assert {"module.1.weight", "module.3.bias", "module.0.weight"} <= set(decayed)
    torch.optim.AdamW([weights, spread]).step()


def test_frozen_parameters_are_left_out() -> None:
    module = network()
    module[1].requires_grad_(False)
    bayes = dubito.bayesianize(module, {"0": MeanField()})
    grouped = {id(p) for g in dubito.parameter_groups(bayes, lr=0.1) for p in g["params"]}
    assert grouped == {id(p) for p in bayes.parameters() if p.requires_grad}
    assert id(module[1].weight) not in grouped


def test_without_randomness_there_is_one_group() -> None:
    (group,) = dubito.parameter_groups(dubito.bayesianize(network(), Point()), lr=0.1)
    assert group["name"] == "weights"


def test_bad_arguments() -> None:
    bayes = dubito.bayesianize(network(), MeanField())
    for lr in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"lr=.* must be positive"):
            dubito.parameter_groups(bayes, lr=lr)
    with pytest.raises(ValueError, match=r"weight_decay=-1.* must be at least 0"):
        dubito.parameter_groups(bayes, lr=0.1, weight_decay=-1.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        dubito.parameter_groups(bayes.requires_grad_(False), lr=0.1)


def test_an_ordinary_module_is_told_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"got Sequential: an ordinary module's parameters\(\)"):
        dubito.parameter_groups(network(), lr=0.1)  # type: ignore[arg-type]
