import pytest
import torch
from torch import nn

import dubito
from dubito.objectives import generalized_variational, negative_elbo


def test_with_a_kl_over_n_it_is_the_negative_elbo() -> None:
    bayes = dubito.bayesianize(nn.Linear(3, 2), dubito.MeanField(), likelihood=dubito.Gaussian())
    nll = bayes.nll(bayes(torch.randn(4, 3)), torch.zeros(4, 2))
    one, two = generalized_variational(nll, bayes.kl(), 1 / 50), negative_elbo(nll, bayes.kl(), 50)
    torch.testing.assert_close(one.loss, two.loss)
    assert one.weight == 1 / 50
    torch.testing.assert_close(one.loss, one.nll + one.weight * one.divergence)


def test_a_weight_of_zero_leaves_the_expected_loss_and_its_gradient() -> None:
    nll, divergence = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    generalized_variational(nll, divergence, 0.0).loss.backward()
    assert float(nll.grad) == 1.0
    assert float(divergence.grad) == 0.0


def test_refusals() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match="infinite where a variance has vanished"):
        generalized_variational(one, torch.tensor(float("inf")), 0.1)
    with pytest.raises(ValueError, match="nll is NaN"):
        generalized_variational(torch.tensor(float("nan")), one, 0.1)
    with pytest.raises(ValueError, match="weight"):
        generalized_variational(one, one, -0.1)
    with pytest.raises(ValueError, match="divergence must be a scalar"):
        generalized_variational(one, torch.ones(2), 0.1)
    with pytest.raises(TypeError, match="nll must be a tensor"):
        generalized_variational(1.0, one, 0.1)  # type: ignore[arg-type]
