import warnings

import pytest
import torch
from torch import nn

import dubito
from dubito import DubitoWarning, mup, objectives
from dubito.implicit_bias import lost_implicit_bias

X, Y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0, 1])


def bayesian(family: dubito.Family) -> dubito.BayesianModule:
    return dubito.bayesianize(nn.Linear(3, 2), family, likelihood=dubito.Categorical())


COLLAPSING = [
    (dubito.MeanField(), r"MeanField on weight, bias is diagonal.*collapses to a point"),
    (dubito.DiagonalCovariance(), "DiagonalCovariance on weight, bias is diagonal"),
    (dubito.KroneckerCovariance(1, 1), "KroneckerCovariance on weight, bias is a product of two factors"),
    (
        dubito.LowRankFactors(1, init="random"),
        "LowRankFactors on weight has independent factor entries",
    ),
]


@pytest.mark.parametrize(("family", "match"), COLLAPSING)
def test_the_expected_loss_says_once_which_covariance_collapses(family: dubito.Family, match: str) -> None:
    bayes = bayesian(family)
    with pytest.warns(DubitoWarning, match=match) as caught:
        objectives.expected_nll(bayes, X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objectives.expected_nll(bayes, X, Y)
        objectives.expected_loss(torch.ones(2), bayes=bayes)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(DubitoWarning, match="^expected_loss: "):  # another network: said again
        objectives.expected_loss(torch.ones(2), bayes=bayesian(family))


def test_nothing_is_said_where_the_theory_holds_or_a_kl_stands_beside() -> None:
    low_rank, mean_field = bayesian(dubito.LowRankCovariance(2)), bayesian(dubito.MeanField())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objectives.expected_nll(low_rank, X, Y)
        mup.parameter_groups(low_rank, 0.1)
        objectives.expected_nll(mean_field, X, Y, with_kl=True)
        mup.parameter_groups(mean_field, 0.1, objective="elbo")
        mup.parameter_groups(nn.Linear(3, 2), 0.1, optimizer="adam", weight_decay=0.1)
    assert lost_implicit_bias(nn.Linear(3, 2), "adam") == []


def test_parameter_groups_say_what_adam_and_decay_do() -> None:
    bayes = bayesian(dubito.LowRankCovariance(2))
    with pytest.warns(
        DubitoWarning, match="Adam rescales each coordinate.*weight decay on .*weight, bias"
    ) as caught:
        mup.parameter_groups(bayes, 0.1, optimizer="adam", weight_decay=0.1)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mup.parameter_groups(bayes, 0.1, optimizer="adam", weight_decay=0.1)
    assert caught[0].filename == __file__


def test_an_optimizer_is_read() -> None:
    bayes = bayesian(dubito.LowRankCovariance(2))
    sgd, decayed = (
        torch.optim.SGD(bayes.parameters(), lr=0.1, momentum=0.9, weight_decay=d) for d in (0.0, 0.1)
    )
    assert lost_implicit_bias(bayes, sgd) == []
    (said,) = lost_implicit_bias(bayes, decayed)
    assert "posterior.weight.factors.bias" in said
    (adam,) = lost_implicit_bias(bayes, torch.optim.AdamW(bayes.parameters(), weight_decay=0.0))
    assert adam.startswith("AdamW rescales")
    plain = torch.optim.SGD(dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.1))
    (only_means,) = lost_implicit_bias(bayes, plain)
    assert "factors" not in only_means
