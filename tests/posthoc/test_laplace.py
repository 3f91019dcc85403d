"""Last-layer Laplace: exact on Bayesian linear regression; a clear error where the extra is missing."""

import copy
import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.posthoc.laplace import LastLayerLaplace, MissingLaplaceError

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("laplace") is None,
    reason="laplace-torch is not installed (make install-laplace)",
)


def regression() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Random features and a linear last layer at the exact posterior mean (noise 0.3, prior precision 2)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(60, 2, dtype=torch.float64)
    y = x[:, :1].sin() + 0.3 * torch.randn(60, 1, dtype=torch.float64)
    with torch.no_grad():
        phi = torch.cat([net[:2](x), torch.ones(60, 1, dtype=torch.float64)], dim=1)
        precision = phi.T @ phi / 0.09 + 2.0 * torch.eye(6, dtype=torch.float64)
        mean = torch.linalg.solve(precision, phi.T @ y / 0.09)
        net[2].weight.copy_(mean[:5].T)
        net[2].bias.copy_(mean[5])
    return net, x, y


@needs_extra
def test_it_is_the_exact_posterior_of_bayesian_linear_regression() -> None:
    net, x, y = regression()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    laplace = LastLayerLaplace.fit(net, loader, dubito.Gaussian(noise=0.3), 2.0, structure="full")
    with torch.no_grad():
        phi = torch.cat([net[:2](x), torch.ones(60, 1, dtype=torch.float64)], dim=1)
    exact = torch.linalg.inv(phi.T @ phi / 0.09 + 2.0 * torch.eye(6, dtype=torch.float64))
    assert torch.allclose(laplace.covariance, exact, rtol=1e-4, atol=1e-6)
    new = 2 * torch.randn(4, 2, dtype=torch.float64)
    with torch.no_grad():
        features = torch.cat([net[:2](new), torch.ones(4, 1, dtype=torch.float64)], dim=1)
    predictive = laplace.predict(new, samples=20_000, generator=torch.Generator().manual_seed(0))
    variance = (features @ exact * features).sum(1, keepdim=True)
    assert torch.allclose(predictive.epistemic, variance, rtol=0.05)
    assert torch.allclose(predictive.mean, net(new), atol=0.02)


@needs_extra
def test_the_marginal_likelihood_prefers_its_own_choice_of_prior() -> None:
    net, x, y = regression()
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    noise = dubito.Gaussian(noise=0.3)
    tuned = LastLayerLaplace.fit(net, loader, noise, "marginal-likelihood", structure="full")
    for precision in (1e-3, 1e3):
        fixed = LastLayerLaplace.fit(net, loader, noise, precision, structure="full")
        assert tuned.log_marginal_likelihood > fixed.log_marginal_likelihood


@needs_extra
def test_the_users_network_stays_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).train()
    net[0].weight.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    loader = DataLoader(TensorDataset(torch.randn(30, 4), torch.randint(3, (30,))), batch_size=10)
    laplace = LastLayerLaplace.fit(net, loader, dubito.Categorical())
    predictive = laplace.predict([(torch.randn(5, 4),), (torch.randn(2, 4),)], samples=8)
    assert predictive.probs.shape == (7, 3)
    assert not predictive.consistent
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert net.training
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True]
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(MissingLaplaceError, match="make install-laplace"):
        LastLayerLaplace.fit(nn.Linear(2, 2), [], dubito.Categorical())


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(TypeError, match="HeteroscedasticGaussian"):
        LastLayerLaplace.fit(nn.Linear(2, 2), [], dubito.HeteroscedasticGaussian())
    with pytest.raises(ValueError, match="structure"):
        LastLayerLaplace.fit(nn.Linear(2, 2), [], dubito.Categorical(), structure="block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prior_precision"):
        LastLayerLaplace.fit(nn.Linear(2, 2), [], dubito.Categorical(), prior_precision=-1.0)
    with pytest.raises(ValueError, match="marginal-likelihood"):
        LastLayerLaplace.fit(nn.Linear(2, 2), [], dubito.Categorical(), prior_precision="best")  # type: ignore[arg-type]
