"""Coordinate check: activations change as much in a wide network as in a narrow one, from the first steps on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito import mup
from dubito.bayesian import BayesianModule

WIDTHS = (64, 256, 1024)


def change_of_hidden_layer(width: int, parametrization: str, seed: int, lr: float = 2**-5) -> float:
    """rms change of the second pre-activation at the posterior mean over five steps of IBVI with SGD."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
    families = {"0": dubito.LowRankCovariance(4), "4": dubito.LowRankCovariance(4)}
    bayes: BayesianModule = dubito.bayesianize(net, families, likelihood=dubito.Categorical())
    mup.initialize_(bayes, parametrization)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(
        mup.parameter_groups(bayes, lr, parametrization=parametrization), momentum=0.9
    )  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 20, generator=generator)
    y = (x @ torch.randn(20, 4, generator=generator)).argmax(1)

    def hidden() -> Tensor:
        with torch.no_grad():
            return net[2](net[1](net[0](x)))

    before = hidden()
    for step in range(5):
        optimizer.zero_grad()
        batch = slice(step % 2 * 128, step % 2 * 128 + 128)
        F.cross_entropy(bayes(x[batch]), y[batch]).backward()
        optimizer.step()
    return float((hidden() - before).square().mean().sqrt())


def averaged(width: int, parametrization: str, seeds: int) -> float:
    return sum(change_of_hidden_layer(width, parametrization, seed) for seed in range(seeds)) / seeds


@pytest.mark.slow
def test_under_mup_the_change_does_not_depend_on_width_and_under_the_standard_parametrisation_it_does() -> (
    None
):
    under_mup = {width: averaged(width, "mup", seeds=12) for width in WIDTHS}
    narrow = under_mup[WIDTHS[0]]
    assert narrow > 0.02
    for width in WIDTHS[1:]:
        assert abs(under_mup[width] / narrow - 1.0) < 0.25, under_mup
    standard = {width: averaged(width, "standard", seeds=4) for width in (WIDTHS[0], WIDTHS[-1])}
    assert standard[WIDTHS[-1]] > 1.6 * standard[WIDTHS[0]]
