import copy

import pytest
import torch
from test_mup_roles import NETWORKS, mlp
from torch import nn

import dubito
from dubito import DubitoWarning, mup

K, M = 20, 64
FAMILIES: dict[str, dubito.Family] = {
    "low_rank": dubito.LowRankCovariance(rank=6),
    "diagonal": dubito.DiagonalCovariance(),
    "kronecker": dubito.KroneckerCovariance(rank_in=8, rank_out=8),
    "mean_field": dubito.MeanField(scale=1.0),
}


@pytest.mark.parametrize(
    ("parametrization", "layer", "weight", "bias"),
    [  # (standard deviation, SGD, Adam); the first layer is 20 → 64, the second 64 → 64, the last 64 → 4
        ("mup", "0", (K**-0.5, M, 1.0), (1.0, M, 1.0)),
        ("mup", "2", (M**-0.5, 1.0, 1 / M), (1.0, M, 1.0)),
        ("mup", "5", (1 / M, 1 / M, 1 / M), (1.0, 4.0, 1.0)),
        ("mup", "3", (1.0, M, 1.0), (1.0, M, 1.0)),
        ("standard", "0", (K**-0.5, 1.0, 1.0), (1.0, 1.0, 1.0)),
        ("standard", "5", (M**-0.5, 1.0, 1.0), (1.0, 1.0, 1.0)),
        ("ntk", "2", (M**-0.5, 1 / M, M**-0.5), (1.0, 1.0, 1.0)),
    ],
)
def test_the_table(
    parametrization: str, layer: str, weight: tuple[float, ...], bias: tuple[float, ...]
) -> None:
    found = mup.scales(mlp(M), parametrization)  # type: ignore[arg-type]
    assert found[f"{layer}.weight"][2:] == pytest.approx(weight)
    assert found[f"{layer}.bias"][2:] == pytest.approx(bias)


@pytest.mark.parametrize(
    ("layer", "name", "k", "m"),
    [
        (nn.Conv2d(6, 8, 3, groups=2), "weight", 3 * 9, 8 * 9),
        (nn.ConvTranspose2d(6, 8, 3, groups=2), "weight", 3 * 9, 8 * 9),
        (nn.Embedding(50, 8), "weight", 1, 8),
        (nn.LSTM(5, 8), "weight_ih_l0", 5, 8),
        (nn.LSTM(5, 8, proj_size=3), "weight_hr_l0", 8, 3),
        (nn.GRU(5, 8), "bias_hh_l0", 8, 8),
        (nn.GRUCell(5, 8), "weight_hh", 8, 8),
        (nn.RNN(5, 8), "weight_hh_l0", 8, 8),
        (nn.MultiheadAttention(8, 2), "in_proj_weight", 8, 8),
        (nn.MultiheadAttention(8, 2, kdim=5, vdim=5), "k_proj_weight", 5, 8),
        (nn.GroupNorm(2, 8), "weight", 1, 8),
        (nn.Bilinear(3, 4, 8), "weight", 12, 8),
        (nn.Linear(7, 1), "weight", 7, 1),
    ],
)
def test_fans_of_every_kind_of_layer(layer: nn.Module, name: str, k: float, m: float) -> None:
    """Seen through the rules: the input role's rate is m, the hidden role's Adam rate 1/k."""
    everything = [n for n, _ in layer.named_parameters()]
    as_input = mup.scales(layer, roles=dict.fromkeys(everything, "input"))
    assert as_input[name].sgd == pytest.approx(m)
    if not as_input[name].vector:
        assert as_input[name].sd == pytest.approx(k**-0.5)
        assert mup.scales(layer, roles=dict.fromkeys(everything, "hidden"))[name].adam == pytest.approx(1 / k)


@pytest.mark.parametrize("parametrization", ["mup", "standard", "ntk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_marginal_prior_variance_is_the_square_of_the_initial_scale(
    family: str, parametrization: str
) -> None:
    network = mlp(128)
    bayes = dubito.bayesianize(network, {"0": FAMILIES[family], "2": FAMILIES[family], "5": FAMILIES[family]})
    variances: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(
        60
    ):  # small layers have few entries, and those of a Kronecker product fewer independent ones
        mup.initialize_(bayes, parametrization, generator=generator)  # type: ignore[arg-type]
        for posterior in bayes.posteriors():
            for name, value in posterior.variance().items():
                variances.setdefault(name, []).append(float(value.mean().detach()))
    for name, values in variances.items():
        sd = mup.scales(network, parametrization)[name].sd  # type: ignore[arg-type]
        assert sum(values) / len(values) == pytest.approx(sd**2, rel=0.2), name
    for name in ("2.weight", "0.weight"):
        parameter = dict(network.named_parameters())[name]
        sd = mup.scales(network, parametrization)[name].sd  # type: ignore[arg-type]
        assert float(parameter.std().detach()) == pytest.approx(sd, rel=0.05)


def test_plain_and_deterministic_parameters_are_initialised_too() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 64, 5), nn.BatchNorm2d(64), nn.PReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(7.0)
        network[1].running_mean.fill_(3.0)
    network[4].bias.requires_grad_(False)
    mup.initialize_(network, generator=torch.Generator().manual_seed(0))
    assert float(network[0].weight.std().detach()) == pytest.approx(1 / 5, rel=0.05)
    assert float(network[0].bias.std().detach()) == pytest.approx(1.0, rel=0.3)
    assert bool(
        (network[1].weight == 1).all() & (network[1].bias == 0).all() & (network[1].running_mean == 0).all()
    )
    assert float(network[2].weight.detach()) == 7.0  # a slope is no Gaussian weight
    assert float(network[4].weight.std().detach()) == pytest.approx(1 / 64, rel=0.15)
    assert bool((network[4].bias == 7).all())  # frozen
    again = copy.deepcopy(network)
    mup.initialize_(again, bias_scale=0.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again[0].weight, network[0].weight)
    assert float(again[0].bias.abs().sum().detach()) == 0.0


def test_a_pretrained_network_keeps_its_means() -> None:
    bayes = dubito.bayesianize(mlp(32), {"5": dubito.LowRankCovariance(4)})
    before = {n: p.clone() for n, p in bayes.module.named_parameters()}
    factor = bayes.posterior["5/weight"].factors["5/weight"]
    old = factor.clone()
    mup.initialize_(bayes, means=False)
    assert all(torch.equal(before[n], p) for n, p in bayes.module.named_parameters())
    assert not torch.equal(old, factor)


def rates(groups: list[dict], bayes: nn.Module) -> dict[str, float]:
    names = {id(p): n for n, p in bayes.named_parameters()}
    return {names[id(p)]: g["lr"] for g in groups for p in g["params"]}


@pytest.mark.parametrize(("optimizer", "power"), [("sgd", 1.0), ("adam", 0.5)])
def test_factors_follow_their_means_slower_by_the_rank(optimizer: str, power: float) -> None:
    bayes = dubito.bayesianize(
        mlp(M), {"0": dubito.LowRankCovariance(4), "5": dubito.KroneckerCovariance(9, 3)}
    )
    found = rates(mup.parameter_groups(bayes, 0.1, optimizer, objective="elbo"), bayes)  # type: ignore[arg-type]
    for name in ("weight", "bias"):
        mean = found[f"module.0.{name}"]
        assert found[f"posterior.0/weight.factors.0/{name}"] == pytest.approx(mean * 4**-power)
    assert found["posterior.5/weight.inputs.5/weight"] == pytest.approx(found["module.5.weight"] * 9**-power)
    assert found["posterior.5/weight.outputs.5/weight"] == pytest.approx(0.1 * 3**-power)
    assert found["module.0.weight"] == pytest.approx(0.1 * (M if optimizer == "sgd" else 1.0))


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("family", [*FAMILIES, "factors", "plain"])
def test_every_trainable_parameter_is_in_exactly_one_group(name: str, family: str) -> None:
    network: nn.Module = NETWORKS[name][0](16)
    next(network.parameters()).requires_grad_(False)
    if family != "plain":
        chosen = FAMILIES.get(family, dubito.LowRankFactors(rank=1, init="svd"))
        likelihood = dubito.Gaussian(learned=True)
        network = dubito.bayesianize(
            network, {"head" if name != "mlp" else "5": chosen, "rest": chosen}, likelihood
        )
    mup.initialize_(network)
    for optimizer in ("sgd", "adam"):
        groups = mup.parameter_groups(network, 0.1, optimizer, weight_decay=0.01)  # type: ignore[arg-type]
        held = [id(p) for g in groups for p in g["params"]]
        assert len(held) == len(set(held))
        assert set(held) == {id(p) for p in network.parameters() if p.requires_grad}
        assert len({g["name"] for g in groups}) == len(groups)
        torch.optim.SGD(groups)
    if family != "plain":
        spread = {id(p) for q in network.posteriors() for p in q.spread_parameters()}
        undecayed = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
        assert spread <= undecayed
        assert id(network.likelihood.log_noise) in undecayed


def test_families_with_scales_of_their_own_are_named() -> None:
    bayes = dubito.bayesianize(mlp(32), {"2.weight": dubito.LowRankFactors(2, init="svd")})
    with pytest.warns(DubitoWarning, match=r"no rule for 2\.weight \(LowRankFactors\)"):
        mup.initialize_(bayes)


def test_bad_input_is_refused() -> None:
    network = mlp(32)
    with pytest.raises(ValueError, match="unknown optimizer 'lion': give one of 'sgd', 'adam'"):
        mup.parameter_groups(network, 0.1, optimizer="lion")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown parametrization"):
        mup.initialize_(network, "abc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr must be a positive"):
        mup.parameter_groups(network, 0.0)
    with pytest.raises(ValueError, match="bias_scale"):
        mup.initialize_(network, bias_scale=-1.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        mup.parameter_groups(network.requires_grad_(False), 0.1)
