"""Deep ensembles: the members are the draws."""

import pytest
import torch
from torch import nn

import dubito
from dubito.posthoc.ensemble import DeepEnsemble


def members(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)) for _ in range(count)]


def test_the_predictive_is_the_average_of_the_members_probabilities() -> None:
    nets, x = members(), torch.randn(7, 4)
    ensemble = DeepEnsemble(nets, dubito.Categorical())
    predictive = ensemble.predict(x)
    expected = torch.stack([net.eval()(x).softmax(-1) for net in nets]).mean(0)
    assert torch.allclose(predictive.probs, expected, atol=1e-6)
    assert predictive.draws is not None
    assert predictive.draws.shape == (3, 7, 3)


def test_a_regression_ensemble_adds_the_members_spread_to_the_noise() -> None:
    nets, x = members(4), torch.randn(5, 4)
    predictive = DeepEnsemble(nets, dubito.Gaussian(noise=0.5)).predict(x)
    outputs = torch.stack([net.eval()(x) for net in nets])
    assert torch.allclose(predictive.mean, outputs.mean(0), atol=1e-6)
    assert torch.allclose(predictive.variance, outputs.var(0, correction=0) + 0.25, atol=1e-5)


def test_batches_give_what_one_input_gives_and_flags_are_put_back() -> None:
    nets, x = members(), torch.randn(7, 4)
    ensemble = DeepEnsemble(nets, dubito.Categorical()).train()
    whole = ensemble.predict(x)
    parts = ensemble.predict([(x[:3], torch.zeros(3)), (x[3:], torch.zeros(4))])
    assert torch.allclose(whole.probs, parts.probs, atol=1e-6)
    assert all(m.training for m in ensemble.modules())


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(ValueError, match="members is empty"):
        DeepEnsemble([], dubito.Categorical())
    with pytest.raises(TypeError, match=r"members\[0\]"):
        DeepEnsemble([torch.zeros(1)], dubito.Categorical())  # type: ignore[list-item]
    with pytest.raises(TypeError, match="likelihood"):
        DeepEnsemble(members(), nn.CrossEntropyLoss())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty loader"):
        DeepEnsemble(members(), dubito.Categorical()).predict([])
    with pytest.raises(TypeError, match="x must be"):
        DeepEnsemble(members(), dubito.Categorical()).predict(3)


def test_one_network_is_no_ensemble() -> None:
    one = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))  # can be iterated over: its layers are no members
    with pytest.raises(TypeError, match="got one Sequential: pass a list"):
        DeepEnsemble(one, dubito.Categorical())  # type: ignore[arg-type]
