"""The methods of the singular comparison: generic inputs, counts of the paper, equal budgets, repeatability."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.experiments.singular.contestants import (
    CONTESTANTS,
    MEMBERS,
    Contest,
    Examples,
    Problem,
    Recipe,
    as_tuple,
    batches,
    mixture_predictive,
    variational_parameters,
)

RANKS = {"0.weight": 3, "2.weight": 1}


def yes_or_no(rows: int = 96, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 12, generator=generator)
    return x, (x[:, :3].sum(1, keepdim=True) > 0).float()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))


def problem(**changes: object) -> Problem:
    base = Problem(
        network, dubito.Bernoulli, yes_or_no(), yes_or_no(48, 1), RANKS, epochs=1, samples=4, at_once=20
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def trained(names: tuple[str, ...], given: Problem) -> dict[str, object]:
    contest = Contest(given)
    return {name: CONTESTANTS[name].train(contest) for name in names}


def test_every_method_predicts_says_what_it_holds_and_leaves_randomness_alone() -> None:
    contest = Contest(problem())
    plain = sum(p.numel() for p in network().parameters())
    before = [p.clone() for p in contest.plain.network.parameters()]
    x = yes_or_no(50, 2)[0]
    for name in CONTESTANTS:
        state = torch.get_rng_state()
        fitted = CONTESTANTS[name].train(contest)
        predictive = fitted.predict(x)
        assert torch.equal(state, torch.get_rng_state()), name
        assert predictive.probs.shape == (50, 1), name
        assert torch.equal(predictive.probs, fitted.predict(x).probs), name
        assert (float(predictive.mutual_information.max()) > 1e-7) == (name != "deterministic"), name
        assert fitted.seconds > 0, name
        if name in ("deterministic", "ensemble", "swag"):
            assert fitted.variational == 0, name
        if name == "ensemble":
            assert fitted.stored == MEMBERS * plain
        if name == "mean-field":
            assert fitted.variational == fitted.stored == 2 * plain
        if name == "rank-one":
            assert fitted.variational == 2 * (22 + 11)
        if name.startswith("low-rank"):
            assert fitted.variational == 2 * (3 * 22 + 1 * 11) + 2 * 11, name
    assert all(torch.equal(a, b) for a, b in zip(before, contest.plain.network.parameters(), strict=True))


def test_the_counts_at_the_papers_size_are_the_papers() -> None:
    net = nn.Sequential(nn.Linear(44, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    ranks = {"0.weight": 15, "2.weight": 15, "4.weight": 1}
    families = {name: dubito.LowRankFactors(rank, "random") for name, rank in ranks.items()}
    with pytest.warns(dubito.DubitoWarning, match="break-even"):
        bayes = dubito.bayesianize(net, {**families, "rest": dubito.MeanField()})
    assert variational_parameters(bayes) == 13_612
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) < 13_612  # the matrices are gone


def test_a_seed_repeats_itself_and_members_differ() -> None:
    x = yes_or_no(30, 2)[0]
    first, second = (trained(("low-rank",), problem()) for _ in range(2))
    assert torch.equal(first["low-rank"].predict(x).probs, second["low-rank"].predict(x).probs)  # type: ignore[attr-defined]
    contest = Contest(problem())
    weights = [next(contest.train_plain(member).network.parameters()) for member in (0, 1)]
    assert not torch.equal(*weights)


def test_beta_reaches_the_objective() -> None:
    x = yes_or_no(30, 2)[0]
    spreads = []
    for beta in (1e-3, 1e3):
        given = problem(batch=4, lr=0.1, recipes={"mean-field": Recipe(beta=beta, warmup=0.0)})
        fitted = CONTESTANTS["mean-field"].train(Contest(given))
        spreads.append(float(fitted.predict(x).mutual_information.mean()))
    assert spreads[1] > 2 * spreads[0]


class TokensAndMask(nn.Module):
    """Takes whole numbers and a mask: two positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        rows = self.rows(tokens) * mask[..., None]
        return self.out(rows.mean(1))


@pytest.mark.parametrize("name", ["deterministic", "low-rank"])
def test_inputs_may_be_several_tensors_of_any_type(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (40, 5), generator=generator)
    examples: Examples = ((tokens, torch.ones(40, 5)), tokens[:, 0] % 2)
    ranks = {"rows.weight": 2, "out.weight": 1}
    given = Problem(
        TokensAndMask, dubito.Categorical, examples, examples, ranks, epochs=1, samples=3, at_once=16
    )
    predictive = CONTESTANTS[name].train(Contest(given)).predict(examples[0])
    assert predictive.probs.shape == (40, 2)


def test_each_member_brings_its_own_noise() -> None:
    outputs = torch.zeros(2, 3, 1)
    likelihoods: list[dubito.Likelihood] = [dubito.Gaussian(1.0), dubito.Gaussian(3.0)]
    predictive = mixture_predictive(outputs, likelihoods)
    assert torch.allclose(predictive.variance, torch.full((3, 1), 5.0))
    assert torch.allclose(predictive.aleatoric, torch.full((3, 1), 5.0))


def test_regression_noise_is_learned_by_every_method() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 12, generator=generator)
    examples: Examples = (x, x[:, :1])
    given = problem(
        likelihood=lambda: dubito.Gaussian(1.0, learned=True),
        train=examples,
        validation=examples,
        epochs=3,
        lr=0.1,
    )
    contest = Contest(given)
    for name in ("deterministic", "mean-field", "low-rank", "swag"):
        noise = CONTESTANTS[name].train(contest).predict(x).aleatoric
        assert not torch.allclose(noise, torch.ones_like(noise), atol=0.02), name


def test_batches_hold_every_example_once() -> None:
    x, y = yes_or_no(33)
    seen = torch.cat([batch[0] for batch in batches((x, y), 8)])
    assert torch.equal(seen.sort(0).values, x.sort(0).values)
    assert as_tuple(x)[0] is x
