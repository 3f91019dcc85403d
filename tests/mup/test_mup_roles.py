from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import mup


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, 4),
    )


class Convolutional(nn.Module):
    """Registered in another order than it is executed in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)
        self.up = nn.ConvTranspose2d(width, width, 2)
        self.norm = nn.BatchNorm2d(width)
        self.stem = nn.Conv2d(1, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(self.stem(x))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, width: int, tokens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width) if tokens else nn.Identity()
        self.rnn = nn.LSTM(width if tokens else 5, width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.embedding = nn.Embedding(9, width)
        self.layer = nn.TransformerEncoderLayer(width, width // 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x) + self.token))


IMAGES, SERIES = torch.randn(2, 1, 8, 8), torch.randn(2, 4, 5)
TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]])
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Tensor, dict[str, str]]] = {
    "mlp": (
        mlp,
        torch.randn(2, 20),
        {"0.weight": "input", "0.bias": "input", "5.weight": "output", "5.bias": "output"},
    ),
    "convolutional": (
        Convolutional,
        IMAGES,
        {"stem.weight": "input", "stem.bias": "input", "head.weight": "output", "head.bias": "output"},
    ),
    "recurrent": (
        lambda width: Recurrent(width, tokens=False),
        SERIES,
        {"rnn.weight_ih_l0": "input", "head.weight": "output", "head.bias": "output"},
    ),
    "embedded": (
        lambda width: Recurrent(width, tokens=True),
        TOKENS,
        {"embedding.weight": "input", "head.weight": "output", "head.bias": "output"},
    ),
    "transformer": (
        Transformer,
        TOKENS,
        {"embedding.weight": "input", "token": "input", "head.weight": "output", "head.bias": "output"},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_roles_by_growth_and_by_execution_agree(name: str) -> None:
    make, example, special = NETWORKS[name]
    network = make(16)
    by_growth = mup.roles(network, base=make(8))
    assert set(by_growth) == {n for n, _ in network.named_parameters()}
    hidden = {n for n, role in by_growth.items() if role == "hidden"}
    weights = {n: r for n, r in special.items() if "bias" not in n}
    assert {n: by_growth[n] for n in weights} == weights
    by_order = mup.roles(network, example=example)
    assert {n: by_order[n] for n in special} == special
    for n in hidden:
        if "bias" not in n:
            assert by_order[n] == "hidden", n
    assert network.training


def test_registration_order_serves_where_it_is_the_order_of_execution() -> None:
    network = mlp(16)
    assert (
        mup.roles(network)
        == mup.roles(network, example=torch.randn(2, 20))
        == mup.roles(network, base=mlp(8))
    )
    assert mup.roles(nn.Linear(3, 2)) == {"weight": "hidden", "bias": "hidden"}


def test_bayesian_modules_have_the_roles_of_their_network() -> None:
    network, expected = mlp(16), mup.roles(mlp(16))
    bayes = dubito.bayesianize(network, {"*": dubito.LowRankCovariance(2)})
    assert mup.roles(bayes, base=mlp(8)) == expected
    factored = dubito.bayesianize(mlp(16), {"*.weight": dubito.LowRankFactors(1, init="svd")})
    assert mup.roles(factored, example=torch.randn(2, 20))["2.weight"] == "hidden"


def test_patterns_win() -> None:
    found = mup.roles(mlp(16), patterns={"2": "output", nn.LayerNorm: "input", "5.b*": "hidden"})
    assert found["2.weight"] == found["2.bias"] == found["5.weight"] == "output"
    assert found["3.weight"] == "input"
    assert found["5.bias"] == "hidden"


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="same network at another width"):
        mup.roles(mlp(16), base=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="make it narrower"):
        mup.roles(mlp(16), base=mlp(16))
    with pytest.raises(ValueError, match="is no role: give one of 'input'"):
        mup.roles(mlp(16), patterns={"2": "middle"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="matches no parameter"):
        mup.roles(mlp(16), patterns={"seven": "input"})
    with pytest.raises(ValueError, match=r"roles leaves out 2\.weight"):
        mup.scales(mlp(16), roles={n: "input" for n, _ in mlp(16).named_parameters() if n != "2.weight"})
