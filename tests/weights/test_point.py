"""Point: the parameter stays an ordinary parameter."""

from __future__ import annotations

import torch
from torch import nn

import dubito


def test_a_point_network_is_the_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    bayes = dubito.bayesianize(net, dubito.Point(), likelihood=dubito.Categorical())
    x = torch.randn(5, 3)
    assert [id(p) for p in bayes.parameters()] == [id(p) for p in net.parameters()]
    torch.manual_seed(1)
    drawn = bayes(x)
    torch.manual_seed(1)
    assert torch.equal(drawn, net(x)), "dropout and all"
    assert float(bayes.kl()) == 0.0
    assert bayes.kl().dtype == torch.float32
    predictive = bayes.predict(x, samples=3)
    assert predictive.mutual_information.abs().max() < 1e-6
    torch.testing.assert_close(predictive.probs, net.eval()(x).softmax(-1))


def test_point_takes_parameters_out_of_rest() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    bayes = dubito.bayesianize(net, {"rest": dubito.MeanField(), "1": dubito.Point()})
    assert {s.name for p in bayes.posteriors() for s in p.slots} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }
    assert isinstance(bayes.families["1.weight"], dubito.Point)
    bayes(torch.ones(2, 3)).sum().backward()
    assert net[1].weight.grad is not None
