"""The learned prior in the hands of other methods: densities, whitening, closed-form KL against Monte Carlo."""

import pytest
import torch

import dubito
from dubito.amortised import BNNProcess
from dubito.amortised.layer_priors import PriorKind


def shaken(prior: PriorKind = "unit", residual: bool = False) -> BNNProcess:
    torch.manual_seed(0)
    process = BNNProcess(2, 1, (4, 4), likelihood=dubito.Gaussian(0.2), prior=prior, residual=residual)
    with torch.no_grad():
        for layer in process.layers:
            for parameter in layer.prior.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return process


@pytest.mark.parametrize("kind", ["unit", "diagonal", "low-rank", "layer"])
def test_density_is_the_processs_and_whitening_makes_it_standard(kind: PriorKind) -> None:
    process = shaken(kind)
    prior = process.weight_prior()
    draws = process.prior.draw(3, torch.Generator().manual_seed(0))
    from dubito.amortised.process_prior import parted

    named = parted(draws)
    torch.testing.assert_close(prior.log_prob(named), process.prior.log_prob(draws))
    white = prior.whiten(named)
    torch.testing.assert_close(prior.unwhiten(white)["layers.1.weight"], named["layers.1.weight"])
    many = prior.whiten(parted(process.prior.draw(20_000, torch.Generator().manual_seed(1))))
    values = many["layers.1.weight"].flatten(1)
    torch.testing.assert_close(torch.cov(values.mT), torch.eye(16).double(), atol=0.05, rtol=0)


@pytest.mark.parametrize("residual", [False, True])
def test_the_plain_network_is_the_processs_function(residual: bool) -> None:
    process = shaken(residual=residual)
    network = process.network().double()
    mean = [layer.shaped(layer.prior.gaussian().mean)[None, None] for layer in process.layers]
    x = torch.randn(7, 2, dtype=torch.float64)
    torch.testing.assert_close(network(x), process.outputs(mean, x.unsqueeze(0))[0, 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["unit", "layer", "diagonal"])
@pytest.mark.parametrize(
    "family",
    [
        dubito.MeanField(),
        dubito.FullCovariance("unit"),
        dubito.FullCovariance("layer"),
        dubito.FullCovariance("network"),
    ],
    ids=["mean field", "unit", "layer", "network"],
)
def test_closed_form_kl_is_that_of_monte_carlo(kind: PriorKind, family: dubito.Family) -> None:
    process = shaken(kind)
    bayes = dubito.bayesianize(
        process.network().double(), family, likelihood=process.likelihood, prior=process.weight_prior()
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in bayes.posterior.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    closed = bayes.kl()
    with torch.no_grad():
        sampled = torch.stack([bayes.kl("monte_carlo", samples=10) for _ in range(20)])
    assert abs(float(closed.detach() - sampled.mean())) < 4 * float(sampled.std()) / 20**0.5
    closed.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in bayes.parameters())


def test_other_families_are_told_of_monte_carlo() -> None:
    process = shaken()
    bayes = dubito.bayesianize(process.network(), dubito.Radial(), prior=process.weight_prior())
    with pytest.raises(dubito.CapabilityError, match="monte_carlo"):
        bayes.kl()


def test_weights_without_a_posterior_are_named() -> None:
    process = shaken()
    bayes = dubito.bayesianize(
        process.network(), {"layers.0.*": dubito.MeanField(prior=process.weight_prior())}
    )
    with pytest.raises(ValueError, match=r"layers\.1\.weight"):
        bayes.kl()


def test_the_prior_is_as_it_was_when_exported() -> None:
    process = shaken()
    prior = process.weight_prior()
    before = prior.covariance(0).clone()
    with torch.no_grad():
        process.layers[0].prior.log_scale.free.add_(1.0)
    torch.testing.assert_close(prior.covariance(0), before)
    torch.testing.assert_close(prior.precision(0) @ before, torch.eye(3).double().expand(4, 3, 3))
    assert float(prior.likelihood.noise) == pytest.approx(0.2)


def test_which_weights_have_a_learned_prior() -> None:
    process = shaken()
    prior = process.prior
    assert prior.weights == 4 * 3 + 4 * 5 + 5
    for fraction in (0.0, 0.3, 0.5, 1.0):
        prior.set_trainable(fraction)
        assert prior.trainable_fraction == pytest.approx(fraction, abs=0.5 / prior.weights)
    prior.set_trainable(0.5, order="front")
    assert bool(process.layers[0].prior.trainable.all())
    assert not bool(process.layers[2].prior.trainable.any())
    prior.set_trainable(0.5, order="back")
    assert bool(process.layers[2].prior.trainable.all())
    prior.set_trainable(layers=[1])
    assert [bool(layer.prior.trainable.all()) for layer in process.layers] == [False, True, False]
    prior.set_trainable(pattern="*.bias")
    assert prior.trainable_fraction == pytest.approx(9 / 37)
    with pytest.raises(ValueError, match="matches no weights"):
        prior.set_trainable(pattern="layer.*")
    with pytest.raises(ValueError, match="exactly one"):
        prior.set_trainable()
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        prior.set_trainable(1.5)
