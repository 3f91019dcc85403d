import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import CapabilityError, last_layer
from dubito.last_layer import OutputMoments, output_moments

FAMILIES: dict[str, object] = {
    "low_rank": dubito.LowRankCovariance(3),
    "mean_field": dubito.MeanField(scale=0.8),
    "diagonal": dubito.DiagonalCovariance(),
    "weight only": {"2.weight": dubito.LowRankCovariance(2)},
    "mixed": {"2.weight": dubito.LowRankCovariance(2), "2.bias": dubito.MeanField(scale=0.8)},
}


def bayesian(family: object, outputs: int = 4) -> tuple[dubito.BayesianModule, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    families = family if isinstance(family, dict) else {"2": family}
    x = torch.randn(6, 3, dtype=torch.float64)
    return dubito.bayesianize(net, families), x, net[1](net[0](x)).detach()


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_match_draws_of_the_weights(name: str) -> None:
    bayes, x, h = bayesian(FAMILIES[name])
    moments = output_moments(bayes, "2", h)
    drawn = bayes.outputs(x, draws=bayes.draw(20_000, torch.Generator().manual_seed(1))).detach()
    spread = moments.variance.detach().sqrt()
    assert float(((drawn.mean(0) - moments.mean) / spread).abs().max()) < 5 / 20_000**0.5
    torch.testing.assert_close(drawn.var(0), moments.variance.detach(), rtol=0.06, atol=0)
    own = moments.draw(20_000, torch.Generator().manual_seed(2)).detach()
    for i in range(2):
        joint = torch.stack([drawn[:, i].mT.cov(), own[:, i].mT.cov()])
        torch.testing.assert_close(joint[0], joint[1], rtol=0, atol=0.06 * float(spread.max()) ** 2)


@pytest.mark.parametrize("outputs", [1, 4])
def test_squared_error_is_exact_for_any_number_of_outputs(outputs: int) -> None:
    bayes, x, h = bayesian(dubito.LowRankCovariance(3), outputs)
    y = torch.randn(6, outputs, dtype=torch.float64)
    drawn = bayes.outputs(x, draws=bayes.draw(20_000, torch.Generator().manual_seed(1))).detach()
    each = (drawn - y).square().sum(-1).mean(-1)
    moments = output_moments(bayes, "2", h)
    value = last_layer.squared_error(moments, y)
    assert abs(float(value.detach() - each.mean())) < 4 * float(each.std()) / 20_000**0.5
    nll = last_layer.gaussian_nll(moments, y, 0.5)
    exact = dubito.Gaussian(0.5).double()
    each = torch.stack([exact.nll(d, y) for d in drawn[:5000]])
    assert abs(float(nll.detach() - each.mean())) < 4 * float(each.std()) / 5000**0.5
    if outputs == 1:
        torch.testing.assert_close(last_layer.squared_error(moments, y[:, 0]), value)


def gaussian_logits(sd: float, classes: int = 1) -> OutputMoments:
    mean = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None].repeat(1, classes)
    mean = mean * torch.linspace(1, -1, classes, dtype=torch.float64) if classes > 1 else mean
    variance = torch.full_like(mean, sd**2)
    return OutputMoments(mean, variance, None, variance)


@pytest.mark.parametrize(("sd", "tolerance"), [(0.0, 1e-7), (0.3, 1e-7), (1.0, 1e-6), (5.0, 1e-2)])
def test_binary_cross_entropy_matches_an_integral(sd: float, tolerance: float) -> None:
    moments = gaussian_logits(sd)
    y = torch.tensor([0.0, 1, 0, 1, 0.5, 1, 0], dtype=torch.float64)
    z = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / (2 * torch.pi) ** 0.5
    f = moments.mean + sd * z
    each = torch.trapezoid((F.softplus(f) - y[:, None] * f) * density, z, dim=-1)
    assert abs(float(last_layer.binary_cross_entropy(moments, y) - each.mean())) < tolerance


def test_binary_cross_entropy_has_a_finite_gradient_without_variance() -> None:
    mean, variance = torch.zeros(2, 1, requires_grad=True), torch.zeros(2, 1, requires_grad=True)
    last_layer.binary_cross_entropy(OutputMoments(mean, variance, None, variance), torch.ones(2)).backward()
    assert bool(mean.grad.isfinite().all() & variance.grad.isfinite().all())


def test_cross_entropy_bound_holds_and_is_loose_where_it_says() -> None:
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    gaps = []
    for sd in (0.1, 1.0, 3.0):
        moments = gaussian_logits(sd, classes=3)
        exact = last_layer.sampled_cross_entropy(moments, y, 20_000, torch.Generator().manual_seed(0))
        gaps.append(float(last_layer.cross_entropy_bound(moments, y) - exact))
    assert -1e-3 < gaps[0] < 0.01
    assert 0.05 < gaps[1] < 1.0
    assert gaps[2] > 1.0


def test_sampled_cross_entropy_is_the_expected_loss() -> None:
    bayes, x, h = bayesian(dubito.LowRankCovariance(3))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    drawn = bayes.outputs(x, draws=bayes.draw(5_000, torch.Generator().manual_seed(1))).detach()
    each = torch.stack([F.cross_entropy(d, y) for d in drawn])
    generator = torch.Generator().manual_seed(3)
    value = last_layer.sampled_cross_entropy(output_moments(bayes, "2", h), y, 5_000, generator)
    assert abs(float(value.detach() - each.mean())) < 5 * float(each.std()) / 5_000**0.5
    value.backward()
    assert float(bayes.posterior["2/weight"].factors["2/weight"].grad.abs().sum()) > 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def test_a_layer_tied_to_an_earlier_one_keeps_its_variance() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(Tied(), dubito.MeanField())
    h = torch.randn(3, 4)
    (variance,) = (p.variance()["embedding.weight"] for p in bayes.posteriors())
    torch.testing.assert_close(output_moments(bayes, "output", h).variance, h.square() @ variance.mT)


def test_refusals() -> None:
    bayes, _, h = bayesian(dubito.LowRankCovariance(3))
    with pytest.raises(ValueError, match=r"no nn\.Linear.*'0', '2'"):
        output_moments(bayes, "1", h)
    with pytest.raises(ValueError, match=r"features must be \(batch, 5\)"):
        output_moments(bayes, "2", h[:, :3])
    with pytest.raises(ValueError, match="y must have the outputs' shape"):
        last_layer.squared_error(output_moments(bayes, "2", h), torch.zeros(6))
    with pytest.raises(CapabilityError, match="not Gaussian"):
        output_moments(bayesian(dubito.LowRankFactors(1, init="svd"))[0], "2", h)
    with pytest.raises(CapabilityError, match="no closed-form output moments for Kronecker"):
        output_moments(bayesian(dubito.KroneckerCovariance(1, 1))[0], "2", h)
