import math
import sys

import pytest
import torch
from torch import nn
from torch.distributions import Normal, StudentT
from torch.nn import functional as F

import dubito
from dubito import certificates
from dubito.certificates import RefusedError, pac_bayes
from dubito.certificates.pac_bayes import MONTE_CARLO_SHARE


def problem(n=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def network(family=None, prior=None, net=None, likelihood=None):
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    family = family or dubito.MeanField(prior=Normal(0.0, 0.5))
    return dubito.bayesianize(net, family, likelihood=likelihood or dubito.Categorical(), prior=prior)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_bound_is_made_of_kl_gibbs_risk_and_n():
    bayes, (x, y) = network(), problem()
    found = pac_bayes(bayes, [(x, y)], samples=64, generator=seeded())
    with torch.no_grad():
        outputs = bayes.eval().outputs(x, draws=bayes.draw(64, seeded()))
    risk = float((outputs.argmax(-1) != y).double().mean())
    assert found.empirical_risk == pytest.approx(risk)
    assert found.kl == pytest.approx(float(bayes.kl().detach()), rel=1e-6)
    assert found.kl == pytest.approx(sum(found.kl_by_parameter.values()))
    spent = MONTE_CARLO_SHARE * 0.05
    corrected = certificates.kl_inverse(risk, math.log(2 / spent) / 64)
    assert found.corrected_risk == pytest.approx(corrected)
    assert found.kl_form == certificates.kl_bound(found.corrected_risk, found.kl, 200, 0.05 - spent)
    assert found.sqrt_form == certificates.sqrt_bound(found.corrected_risk, found.kl, 200, 0.05 - spent)
    assert found.bound == found.kl_form <= found.sqrt_form
    assert (found.n, found.predictor) == (200, "Gibbs")


def test_a_loader_gives_what_the_tensors_give():
    bayes, (x, y) = network(), problem()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=33)
    one = pac_bayes(bayes, (x, y), samples=400, generator=seeded())
    two = pac_bayes(bayes, loader, samples=400, generator=seeded(1))
    assert two.empirical_risk == pytest.approx(one.empirical_risk, abs=0.02)
    assert two.kl == one.kl
    assert one.n == two.n == 200


def test_batches_have_draws_of_their_own_and_count_as_independent():
    bayes, (x, y) = network(), problem()
    batches = [(x[:90], y[:90]), (x[90:180], y[90:180]), (x[180:], y[180:])]
    found = certificates.gibbs_risk(bayes, batches, samples=5, generator=seeded())
    generator = seeded()
    with torch.no_grad():
        wrong = [(bayes.outputs(a, draws=bayes.draw(5, generator)).argmax(-1) != b).sum() for a, b in batches]
    assert found.risk == pytest.approx(float(sum(wrong)) / (5 * 200))
    assert (found.n, found.evaluations) == (200, 15)
    assert found.evenness == pytest.approx(200 / 270)
    budget = math.log(2 / 0.01) / 15
    assert found.upper(0.01) == pytest.approx(
        certificates.kl_inverse(found.risk * found.evenness, budget) / found.evenness
    )


def test_draws_that_do_not_fit_at_once_are_the_same_draws(monkeypatch):
    bayes, data = network(), problem(600)
    one = certificates.gibbs_risk(bayes, data, samples=10, generator=seeded())
    monkeypatch.setattr(sys.modules["dubito.certificates.gibbs_risk"], "_ENTRIES_AT_ONCE", 300)
    two = certificates.gibbs_risk(bayes, data, samples=10, generator=seeded())
    assert two == one


def test_flags_and_parameters_are_left_as_they_were():
    bayes, data = network(), problem()
    bayes.train()
    bayes.module[1].eval()
    state = {n: v.clone() for n, v in bayes.state_dict().items()}
    pac_bayes(bayes, data, samples=4)
    assert bayes.training
    assert not bayes.module[1].training
    assert all(torch.equal(v, state[n]) for n, v in bayes.state_dict().items())


def test_the_bound_covers_the_true_gibbs_risk():
    """Inputs are isotropic, so the error of a direction is its angle to the true one over π, and the risk is exact.

    The empirical risk, which is no bound, is below the truth about every other time; the bound at δ = 0.2 never needs
    to be above it more often than that.
    """
    delta, repeats = 0.2, 60
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    bayes = dubito.bayesianize(net, dubito.MeanField(prior=Normal(0.0, 1.0)), likelihood=dubito.Bernoulli())
    generator = seeded(1)
    bound_fails, risk_fails = 0, 0
    for _ in range(repeats):
        x = torch.randn(40, 2, generator=generator)
        y = (x[:, :1] > 0).float()
        with torch.no_grad():
            net.weight.copy_(3 * ((2 * y - 1) * x).mean(0, keepdim=True))
            weights = bayes.draw(1000, generator).components(bayes)[0]["weight"].reshape(-1, 2)
        truth = float(torch.atan2(weights[:, 1].abs(), weights[:, 0]).mean() / math.pi)
        found = pac_bayes(bayes, (x, y), delta=delta, samples=30, generator=generator)
        bound_fails += truth > found.bound
        risk_fails += truth > found.empirical_risk
    assert risk_fails > delta * repeats
    assert bound_fails <= delta * repeats


def test_the_correction_for_draws_covers_the_gibbs_risk_on_the_data():
    bayes, data = network(dubito.MeanField(prior=Normal(0.0, 0.5), scale=1.0)), problem(50)
    exact = certificates.gibbs_risk(bayes, data, samples=2000, generator=seeded(9)).risk
    fails = below = 0
    uneven = [(data[0][:40], data[1][:40]), (data[0][40:], data[1][40:])]
    for seed in range(50):
        found = pac_bayes(bayes, uneven, delta=0.5, samples=5, generator=seeded(seed))
        fails += exact > found.corrected_risk
        below += exact > found.empirical_risk
    assert below > 10
    assert fails <= 5  # δ' = 0.1


class Keyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, values):
        return self.inner(values)


def test_batches_may_be_mappings_with_labels():
    bayes, (x, y) = network(net=Keyword()), problem()
    batch = {"values": x, "labels": y}
    named = pac_bayes(bayes, [batch], samples=8, generator=seeded())
    assert named.bound == pac_bayes(bayes, [(x, y)], samples=8, generator=seeded()).bound
    with pytest.raises(TypeError, match="labels"):
        pac_bayes(bayes, [{"values": x}], samples=8)


def test_choices_divide_delta():
    bayes, data = network(), problem()
    one = pac_bayes(bayes, data, delta=0.01, samples=16, generator=seeded())
    ten = pac_bayes(bayes, data, delta=0.1, choices=10, samples=16, generator=seeded())
    assert ten.bound == pytest.approx(one.bound)
    assert "one of 10 candidates" in str(ten)


def test_vacuous_is_said_against_guessing():
    bayes, data = network(), problem(60)
    small = pac_bayes(bayes, data, samples=16)
    assert small.trivial == 0.5
    assert small.bound > 0.5
    assert small.vacuous
    assert "VACUOUS" in str(small)
    x, y = problem(4000)
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, -0.5, 0, 0], [1.0, 0.5, 0, 0]]))
        net.bias.zero_()
    good = network(net=net, prior=Normal(0.0, 1.0))
    found = pac_bayes(good, (x, y), samples=64)
    assert found.bound < 0.5
    assert not found.vacuous
    assert "VACUOUS" not in str(found)


def test_a_clipped_loss_is_vacuous_at_even_odds_not_only_at_one():
    """The inverted-kl form never reaches 1, however large the KL: against 1 it would always say something."""
    bayes, data = network(), problem(60)
    wide = pac_bayes(bayes, data, loss=certificates.clipped_cross_entropy(cap=4.0), samples=16)
    assert math.log(2) / 4.0 < wide.bound < 1.0
    assert wide.vacuous


def test_frozen_weights_are_an_assumption():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    families = {"2": dubito.MeanField(prior=Normal(0.0, 1.0))}
    found = pac_bayes(
        dubito.bayesianize(net, families, likelihood=dubito.Categorical()), problem(60), samples=4
    )
    assert any("2 frozen parameters" in sentence for sentence in found.assumptions)
    assert not any(
        "frozen" in sentence for sentence in pac_bayes(network(), problem(60), samples=4).assumptions
    )


def test_plain_networks_are_refused_by_name():
    data = problem(60)
    for ask in (
        lambda: pac_bayes(nn.Linear(4, 2), data),
        lambda: certificates.rank_sweep(nn.Linear(4, 2), data),
        lambda: certificates.stochastic_gap(nn.Linear(4, 2), nn.Linear(4, 2), data[0]),
        lambda: certificates.gaussian_complexity(nn.Linear(4, 2), data[0], 0.1, lipschitz=1.0),
    ):
        with pytest.raises(TypeError, match=r"not Linear|got Linear"):
            ask()


def test_a_clipped_loss_is_certified_too():
    bayes, (x, y) = network(), problem(2000)
    loss = certificates.clipped_cross_entropy(cap=3.0)
    found = pac_bayes(bayes, [(x, y)], loss=loss, samples=32, generator=seeded())
    with torch.no_grad():
        outputs = bayes.outputs(x, draws=bayes.draw(32, seeded()))
    raw = F.cross_entropy(outputs.flatten(0, 1), y.repeat(32), reduction="none")
    assert found.empirical_risk == pytest.approx(float(raw.clamp(max=3.0).mean() / 3.0), rel=1e-5)
    assert found.trivial == pytest.approx(math.log(2) / 3.0), "even odds cost log 2 nats"
    own = pac_bayes(bayes, (x, y), loss=lambda z, t: (z.argmax(-1) != t).double(), samples=8)
    assert 0 <= own.empirical_risk <= own.bound
    regression = network(likelihood=dubito.Gaussian(0.1))
    squares = certificates.ClippedLoss(lambda z, t: (z - t).square().sum(-1), cap=4.0)
    assert pac_bayes(regression, (x, torch.randn(2000, 2)), loss=squares, samples=8).empirical_risk <= 1.0


def test_several_outcomes_count_as_one_datum():
    net = nn.Linear(4, 3)
    bayes = dubito.bayesianize(net, dubito.MeanField(prior=Normal(0.0, 1.0)), likelihood=dubito.Bernoulli())
    x, y = torch.randn(20, 4), torch.randint(2, (20, 3)).float()
    found = pac_bayes(bayes, [(x, y)], samples=8, generator=seeded())
    with torch.no_grad():
        outputs = bayes.outputs(x, draws=bayes.draw(8, seeded()))
    assert found.n == 20
    assert found.empirical_risk == pytest.approx(float(((outputs > 0) != (y > 0.5)).double().mean()))


@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        "nll",
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="none"),
        lambda z, y: F.cross_entropy(z.flatten(0, 1), y.repeat(len(z)), reduction="none").reshape(len(z), -1),
    ],
)
def test_an_unbounded_loss_is_refused(loss):
    with pytest.raises(RefusedError, match="clip"):
        pac_bayes(network(), problem(), loss=loss, samples=4)


def test_the_likelihood_itself_is_no_bounded_loss():
    bayes = network()
    for loss in (bayes.nll, bayes.likelihood.nll):
        with pytest.raises(RefusedError, match="unbounded"):
            pac_bayes(bayes, problem(), loss=loss, samples=4)
    with pytest.raises(RefusedError, match="ClippedLoss"):
        pac_bayes(network(likelihood=dubito.Gaussian(0.1)), problem(), samples=4)
    with pytest.raises(ValueError, match="without reduction"):
        pac_bayes(bayes, problem(), loss=lambda z, y: torch.zeros(()), samples=4)
    with pytest.raises(ValueError, match="NaN"):
        pac_bayes(bayes, problem(), loss=lambda z, y: z[..., 0] * math.nan, samples=4)


FROM_DATA = {
    "pretrained": lambda: network(dubito.MeanField(prior="pretrained")),
    "pretrained by bayesianize": lambda: network(dubito.MeanField(), prior=dubito.Pretrained(0.1)),
    "a normal of tensors": lambda: network(
        {"0.weight": dubito.MeanField(prior=Normal(torch.randn(8, 4), 1.0)), "rest": dubito.MeanField()}
    ),
    "svd": lambda: network(dubito.LowRankFactors(1, init="svd")),
    "svd under a rule": lambda: network(dubito.LowRankFactors(1, init="svd", prior=dubito.FanIn())),
    "auto rank": lambda: network(
        {
            "2.weight": dubito.LowRankFactors("auto", init="svd", prior=Normal(0.0, 1.0)),
            "rest": dubito.MeanField(),
        }
    ),
    "deterministic biases": lambda: network({"*.weight": dubito.MeanField()}),
    "batch statistics": lambda: network(
        net=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ),
    "rank one": lambda: network(dubito.RankOne(fallback=dubito.MeanField())),
}


@pytest.mark.parametrize("name", list(FROM_DATA))
@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
def test_what_may_come_from_the_data_is_refused_unless_asserted(name):
    with pytest.raises(RefusedError, match="prior_is_fixed=True"):
        pac_bayes(FROM_DATA[name](), problem(), samples=4)
    found = pac_bayes(FROM_DATA[name](), problem(), samples=4, prior_is_fixed=True)
    assert any("You assert" in sentence for sentence in found.assumptions)


def test_a_learned_prior_is_refused_whatever_is_asserted_until_frozen():
    bayes = network(dubito.MeanField(), prior=dubito.EmpiricalBayes())
    with pytest.raises(RefusedError, match="held-out"):
        pac_bayes(bayes, problem(), samples=4, prior_is_fixed=True)
    for name, parameter in bayes.named_parameters():
        if "log_gain" in name:
            parameter.requires_grad_(False)
    with pytest.raises(RefusedError, match="EmpiricalBayes"):
        pac_bayes(bayes, problem(), samples=4)
    assert pac_bayes(bayes, problem(), samples=4, prior_is_fixed=True).bound > 0


def test_a_fixed_prior_makes_svd_and_frozen_weights_valid():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    bayes = network(
        {
            "2.weight": dubito.LowRankFactors(1, init="svd", prior=Normal(0.0, 0.5)),
            "2.bias": dubito.MeanField(),
        },
        net=net,
    )
    assert pac_bayes(bayes, problem(), samples=4).bound > 0


def test_a_sampled_kl_is_refused_and_a_bounded_one_said():
    with pytest.raises(RefusedError, match="Monte Carlo"):
        pac_bayes(network(dubito.MeanField(prior=StudentT(4.0))), problem(), samples=4)
    with pytest.raises(RefusedError, match="KL"):
        pac_bayes(network({"0": dubito.LowRankCovariance(2), "2": dubito.MeanField()}), problem(), samples=4)
    mixture = network(dubito.MeanField(prior=dubito.ScaleMixture(0.5, 1.0, math.exp(-6))))
    found = pac_bayes(mixture, problem(), samples=4)
    assert found.kl == pytest.approx(float(mixture.kl("bound").detach()), rel=1e-6)
    sampled = float(mixture.kl("monte_carlo", samples=200).detach())
    assert found.kl > sampled - 3.0
    assert any("upper bound" in sentence for sentence in found.assumptions)


def test_no_global_randomness_is_used_with_a_generator_nor_any_by_the_kl():
    bayes, data = network(), problem()
    state = torch.get_rng_state()
    one = pac_bayes(bayes, data, samples=8, generator=seeded())
    assert torch.equal(state, torch.get_rng_state())
    assert one.bound == pac_bayes(bayes, data, samples=8, generator=seeded()).bound


def test_the_papers_ratio_stands_beside_the_bound():
    torch.manual_seed(0)
    net = nn.Linear(128, 44, bias=False)
    bayes = dubito.bayesianize(net, dubito.LowRankFactors(15, init="random"), likelihood=dubito.Categorical())
    x, y = torch.randn(20, 128), torch.randint(44, (20,))
    found = pac_bayes(bayes, (x, y), samples=4)
    assert found.ratios == {"weight": pytest.approx(math.sqrt(15 * (44 + 128) / (44 * 128)))}
    assert found.ratio == found.ratios["weight"]
    dense = pac_bayes(network(), problem(), samples=4)
    assert (dense.ratio, dense.ratios) == (1.0, {})


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"delta": 0.0}, ValueError, "delta"),
        ({"samples": 0}, ValueError, "samples"),
        ({"choices": 0}, ValueError, "choices"),
    ],
)
def test_bad_options_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        pac_bayes(network(), problem(), **options)


def test_bad_data_are_refused():
    bayes, (x, y) = network(), problem()
    with pytest.raises(ValueError, match="at least 8"):
        pac_bayes(bayes, (x[:7], y[:7]), samples=4)
    with pytest.raises(ValueError, match="no batch"):
        pac_bayes(bayes, [], samples=4)
    with pytest.raises(ValueError, match="200 data, y 7"):
        pac_bayes(bayes, (x, y[:7]), samples=4)
    with pytest.raises(TypeError, match=r"\(x, y\)"):
        pac_bayes(bayes, x, samples=4)
    with pytest.raises(ValueError, match="class"):
        pac_bayes(bayes, (x, y + 5), samples=4)
