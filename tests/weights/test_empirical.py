"""Empirical: exact moments and averages of given draws, on kinds of modules, whole-network draws, and refusals."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import Empirical

COUNT = 5


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.embedding(tokens).tanh())
        return output


class Recurrent(nn.Module):
    """An LSTM, whose fused kernel has no batching rule."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(x)[0][:, -1])
        return output


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 2)
    ),
    "tied": Tied,
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
}
SHAPES = {"mlp": (5,), "conv": (1, 5, 5), "recurrent": (4, 3), "attention": (4, 4)}


def plain(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[kind]().to(dtype)


def inputs(kind: str, batch: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "tied":
        return torch.randint(0, 7, (batch, 4), generator=generator)
    return torch.randn(batch, *SHAPES[kind], generator=generator, dtype=dtype)


def draws_for(module: nn.Module, count: int = COUNT, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.3 * torch.randn(count, *p.shape, generator=generator).to(p.dtype)
        for name, p in module.named_parameters()
    }


def empirical(kind: str = "mlp", exact: bool = True) -> tuple[dubito.BayesianModule, dict[str, Tensor]]:
    module = plain(kind, dtype=torch.float64)
    draws = draws_for(module)
    bayes = dubito.bayesianize(module, Empirical(draws, exact), likelihood=dubito.Gaussian(0.1))
    bayes.module.eval()
    return bayes, draws


def outputs_one_by_one(kind: str, draws: dict[str, Tensor], x: Tensor) -> Tensor:
    module = plain(kind, dtype=torch.float64).eval()
    with torch.no_grad():
        outputs = [
            torch.func.functional_call(module, {n: d[s] for n, d in draws.items()}, (x,), tie_weights=True)
            for s in range(COUNT)
        ]
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", list(MAKERS))
def test_prediction_by_as_many_draws_is_the_exact_average(kind: str) -> None:
    bayes, draws = empirical(kind)
    x = inputs(kind)
    expected = outputs_one_by_one(kind, draws, x)
    for samples in (COUNT, 2 * COUNT):
        predictive = bayes.predict(x, samples=samples)
        torch.testing.assert_close(predictive.mean, expected.mean(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            predictive.epistemic, expected.var(0, unbiased=False), rtol=1e-8, atol=1e-10
        )
    torch.testing.assert_close(bayes.outputs(x, samples=COUNT), expected, rtol=1e-10, atol=1e-10)
    kept = bayes.draw(COUNT)
    torch.testing.assert_close(
        bayes.outputs(x, draws=kept[1:3], chunk_size=1), expected[1:3], rtol=1e-10, atol=1e-10
    )


def test_streams_in_chunks_take_each_draw_once_too() -> None:
    bayes, draws = empirical()
    x = inputs("mlp", 6)
    expected = outputs_one_by_one("mlp", draws, x)
    batches = [(x[:4],), (x[4:],)]
    for chunk in (None, 2):
        predictive = bayes.predict(batches, samples=COUNT, chunk_size=chunk, keep_draws=True)
        torch.testing.assert_close(predictive.draws, expected, rtol=1e-10, atol=1e-10)


def test_another_number_is_picked_at_random_and_by_the_generator() -> None:
    bayes, draws = empirical()
    x = inputs("mlp")
    expected = outputs_one_by_one("mlp", draws, x)
    first, again, other = (
        bayes.outputs(x, samples=400, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other[torch.randperm(400)])
    which = (first.flatten(1)[:, None] - expected.flatten(1)).abs().sum(-1).argmin(1)
    assert torch.allclose(first, expected[which])
    picked = torch.bincount(which, minlength=COUNT)
    assert float((picked - 80).square().sum()) / 80 < 23.5  # χ² with 4 degrees of freedom, 1e-4
    random, _ = empirical(exact=False)
    indices = random.draw(COUNT, torch.Generator().manual_seed(0)).noise
    assert indices[next(iter(indices))]["index"].tolist() != list(range(COUNT))


def test_a_draw_is_joint_over_parameters() -> None:
    """Random calls give only outputs of whole draws, never a mixture of two."""
    bayes, draws = empirical()
    x = inputs("mlp")
    expected = outputs_one_by_one("mlp", draws, x)
    bayes.train()
    bayes.module.eval()
    for _ in range(10):
        output = bayes(x)
        assert min(float((output - e).abs().max()) for e in expected) < 1e-12
    frozen = bayes.sample(torch.Generator().manual_seed(3))
    assert min(float((frozen(x) - e).abs().max()) for e in expected) < 1e-12


def test_moments_are_exact_and_the_mean_module_is_at_the_mean() -> None:
    bayes, draws = empirical()
    (posterior,) = bayes.posteriors()
    for name, values in draws.items():
        torch.testing.assert_close(posterior.mean()[name], values.mean(0))
        torch.testing.assert_close(posterior.variance()[name], values.var(0, unbiased=False))
        moments = posterior.gaussian_weights()[name]
        torch.testing.assert_close(moments.variance, values.var(0, unbiased=False))
        torch.testing.assert_close(dict(bayes.merge().named_parameters())[name].data, values.mean(0))
    drawn = posterior.draw((3, 2), torch.Generator().manual_seed(0))
    assert all(drawn[name].shape == (3, 2, *values.shape[1:]) for name, values in draws.items())
    x = inputs("mlp")
    torch.testing.assert_close(bayes.eval()(x), bayes.merge().eval()(x))
    bayes.rescale_spread_(0.5)
    for name, values in draws.items():
        torch.testing.assert_close(posterior.variance()[name], 0.25 * values.var(0, unbiased=False))
        torch.testing.assert_close(posterior.mean()[name], values.mean(0))


def test_it_is_saved_copied_and_converted_with_its_draws() -> None:
    bayes, _ = empirical()
    x = inputs("mlp")
    expected = bayes.predict(x, samples=COUNT).mean
    torch.testing.assert_close(copy.deepcopy(bayes).predict(x, samples=COUNT).mean, expected)
    other = dubito.bayesianize(
        plain("mlp", dtype=torch.float64),
        Empirical(draws_for(plain("mlp"), seed=9)),
        likelihood=dubito.Gaussian(0.1),
    )
    other.load_state_dict(bayes.state_dict())
    torch.testing.assert_close(other.predict(x, samples=COUNT).mean, expected)
    single = bayes.float().predict(x.float(), samples=COUNT).mean
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)
    assert not [p for p in bayes.parameters() if p.requires_grad]


def test_frozen_and_ordinary_parameters_stand_beside_it() -> None:
    module = plain("mlp")
    names = [name for name, _ in module.named_parameters()]
    draws = {name: value for name, value in draws_for(module).items() if name != names[0]}
    bayes = dubito.bayesianize(module, {names[0]: dubito.Point(), "rest": Empirical(draws)})
    assert [name for name, p in bayes.module.named_parameters()] == [names[0]]
    bayes(inputs("mlp", dtype=torch.float32)).sum().backward()
    assert module.get_parameter(names[0]).grad is not None


@pytest.mark.parametrize(
    "ask",
    [
        lambda bayes, _: bayes.kl(),
        lambda bayes, posterior: posterior.log_prob(posterior.draw()),
        lambda bayes, _: bayes.wasserstein(copy.deepcopy(bayes)),
    ],
    ids=["kl", "log_prob", "wasserstein"],
)
def test_what_points_do_not_have_is_said_with_the_remedy(ask: Any) -> None:
    bayes, _ = empirical()
    (posterior,) = bayes.posteriors()
    with pytest.raises(dubito.CapabilityError, match="set of equally weighted draws"):
        ask(bayes, posterior)


@pytest.mark.parametrize(
    ("draws", "error", "message"),
    [
        ([torch.zeros(2, 3)], TypeError, "must map parameter names"),
        ({}, ValueError, "draws is empty"),
        ({"weight": torch.zeros(2, 1, 3, dtype=torch.int64)}, TypeError, r"'weight'.*int64"),
        ({"weight": torch.zeros(0, 1, 3)}, ValueError, "the draws lead"),
        ({"weight": torch.full((2, 1, 3), torch.nan)}, ValueError, "6 NaN or infinite of 6"),
        ({"weight": torch.zeros(2, 1, 3), "bias": torch.zeros(3, 1)}, ValueError, "same number of draws"),
        ({"weight": torch.zeros(2, 1, 3)}, ValueError, r"none for the parameter 'bias'.*Point"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2, 1)}, ValueError, r"parameter is \(1, 3\)"),
        (
            {"weight": torch.zeros(2, 1, 3), "bias": torch.zeros(2, 1), "w": torch.zeros(2, 1)},
            ValueError,
            "'w', which the pattern does not name",
        ),
    ],
)
def test_bad_draws(draws: object, error: type[Exception], message: str) -> None:
    module = nn.Linear(3, 1)
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(error, match=message):
        dubito.bayesianize(module, Empirical(draws))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
