"""Gaussian tensors: they behave as tensors, agree with Monte Carlo, and never lose a variance in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import dubito
from dubito.moments import (
    Context,
    GaussianTensor,
    InvalidMomentsError,
    Moments,
    NoRuleError,
    gaussian_weights,
    propagated,
)
from dubito.moments.propagate import sites_of_draw, standing_in

Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, forward: Forward, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.vector = nn.Parameter(torch.randn(6))
        self.register_buffer("buffer", torch.zeros(4, 6))
        self.extra = extra
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def network(forward: Forward, extra: nn.Module | None = None) -> dubito.BayesianModule:
    torch.manual_seed(0)
    random = {name: dubito.MeanField(scale=0.1) for name in ("first", "last", "vector")}
    return dubito.bayesianize(Net(forward, extra), random, likelihood=dubito.Categorical())


def inputs() -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def between(middle: Callable[[Tensor], Tensor]) -> Forward:
    return lambda net, x: net.last(middle(net.first(x)))


def squared(h: Tensor) -> Tensor:
    return h * h


def own_silu(h: Tensor) -> Tensor:
    return h * torch.sigmoid(h)


def own_gelu(h: Tensor) -> Tensor:
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0))))


def added_in_place(h: Tensor) -> Tensor:
    out = F.relu(h, inplace=True)
    out += h
    return out


def written(h: Tensor) -> Tensor:
    h[:, 0] += 1.0
    h[:, 1] = 0.0
    h[:, 2:4] *= 2.0
    return h


def written_view(h: Tensor) -> Tensor:
    h.view(-1).relu_()
    return h


def written_beside(h: Tensor) -> Tensor:
    """The write into `other` must not reach `h`, with which it could share a variance."""
    other = h + 1.0
    other.zero_()
    return h + 0.0 * other


SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in_place": nn.ReLU(inplace=True),
    "clamp": lambda h: h.clamp(-0.5, 0.5),
    "square": squared,
    "own_silu": own_silu,
    "own_gelu": own_gelu,
    "sum_with_itself": lambda h: h + h,
    "no_rule_but_elementwise": torch.sinc,
    "untagged_elementwise": F.hardswish,
    "added_in_place": lambda h: added_in_place(h * 1.0),
    "written": written,
    "written_view": written_view,
    "written_beside": written_beside,
    "reflected": lambda h: 1.0 - h / 2.0,
    "type": lambda h: h.type(torch.float32).data.detach(),
    "unbound": lambda h: torch.stack(list(h.unbind(1)), 1),
    "rows": lambda h: torch.stack(list(h)),
    "where": lambda h: torch.where(h.new_ones(6).cumsum(0) > 3, h, torch.zeros(())),
    "permuted": lambda h: h.t().flip(0).flip(0).transpose(0, 1).unsqueeze(1).squeeze(1),
    "checkpointed": lambda h: torch.utils.checkpoint.checkpoint(F.relu, h, use_reentrant=False),
    "checkpointed_reentrant": lambda h: torch.utils.checkpoint.checkpoint(F.relu, h, use_reentrant=True),
    "compiled": torch.compile(nn.ReLU(), backend="eager"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_agrees_with_monte_carlo(name: str) -> None:
    bayes = network(between(SMALL[name]))
    moments = propagated(bayes, inputs())
    draws = bayes.outputs(inputs(), draws=bayes.draw(4000, torch.Generator().manual_seed(2)))
    error = (moments.mean - draws.mean(0)).abs() / draws.var(0).sqrt()
    assert float(error.max()) < 6 / 4000**0.5
    ratio = moments.variance / draws.var(0)
    assert float(ratio.min()) > 0.88
    assert float(ratio.max()) < 1.13


@torch.no_grad()
def test_linear_network_is_exact() -> None:
    """Two linear layers with an exact square between them have exact means."""
    bayes = network(between(squared))
    moments = propagated(bayes, inputs())
    weights = gaussian_weights(bayes)
    hidden = F.linear(inputs(), weights["first.weight"].mean, weights["first.bias"].mean)
    spread = F.linear(inputs().square(), weights["first.weight"].variance, weights["first.bias"].variance)
    mean = F.linear(hidden.square() + spread, weights["last.weight"].mean, weights["last.bias"].mean)
    torch.testing.assert_close(moments.mean, mean)
    second = 2 * spread.square() + 4 * hidden.square() * spread
    variance = (
        F.linear(second, weights["last.weight"].second)
        + F.linear((hidden.square() + spread).square(), weights["last.weight"].variance)
        + weights["last.bias"].variance
    )
    torch.testing.assert_close(moments.variance, variance)


def test_is_a_tensor_that_is_its_mean() -> None:
    mean, variance = torch.randn(3, 4), torch.rand(3, 4)
    x = GaussianTensor.of(Moments(mean, variance), Context())
    assert isinstance(x, Tensor)
    assert (x.shape, x.dtype, x.device, x.dim(), x.size(1), len(x)) == (
        mean.shape,
        mean.dtype,
        mean.device,
        2,
        4,
        3,
    )
    assert x.data_ptr() == mean.data_ptr()
    assert torch.zeros_like(x).equal(torch.zeros(3, 4))
    assert x.variance is variance
    y = x.to(torch.float64)
    assert isinstance(y, GaussianTensor)
    assert y.variance.dtype == torch.float64
    assert x.to(torch.float32) is x
    assert "variance" in repr(x)


BAD: dict[str, tuple[Forward, str]] = {
    "item": (lambda net, x: net.last(net.first(x) * net.first(x).sum().item()), "one number"),
    "float": (lambda net, x: net.last(net.first(x) * float(net.first(x)[0, 0])), "one number"),
    "numpy": (lambda net, x: torch.from_numpy(net.first(x).numpy()), "one number"),
    "list": (lambda net, x: torch.tensor(net.first(x).tolist()), "one number"),
    "branch": (lambda net, x: net.last(net.first(x)) if net.first(x).sum() > 0 else net.first(x), "'gt'"),
    "out": (lambda net, x: net.last(torch.add(net.first(x), 1.0, out=torch.empty(4, 6))), r"out="),
    "buffer": (lambda net, x: net.last(net.buffer.copy_(net.first(x))), r"plain tensor of shape \(4, 6\)"),
    "buffer_entry": (lambda net, x: net.last(net.buffer.__setitem__(0, net.first(x)[0])), "plain tensor"),
    "buffer_sum": (lambda net, x: net.last(net.buffer.add_(net.first(x))), "plain tensor"),
    "parameter": (lambda net, x: net.last(net.first(x) + net.vector.mul_(2.0)), "random parameter 'vector'"),
    "parameter_view": (
        lambda net, x: net.last(net.first(x) + net.vector.view(2, 3).mul_(2.0).view(6)),
        "'vector'",
    ),
    "no_rule": (
        lambda net, x: net.last(torch.fft.fft(net.first(x)).real),
        "'fft_fft' in the network's own forward",
    ),
    "copied": (lambda net, x: net.last(torch.tensor(net.first(x))), "below __torch_function__"),
    "mapped": (
        lambda net, x: net.last(torch.vmap(lambda r: 2 * r)(net.first(x))),
        "below __torch_function__",
    ),
    "no_part": (lambda net, x: x[:, :3] * 1.0, "carries no variance"),
    "sorted": (lambda net, x: net.last(net.first(x).sort(-1)[0]), "'sort'"),
    "integers": (lambda net, x: net.last(net.first(x).to(torch.int64).float()), "integer"),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", BAD)
@torch.no_grad()
def test_a_lost_variance_is_an_error(name: str) -> None:
    forward, message = BAD[name]
    bayes = network(forward)
    before = {n: p.clone() for n, p in bayes.named_parameters()}
    with pytest.raises(NoRuleError, match=message):
        propagated(bayes, inputs())
    assert all(torch.equal(p, before[n]) for n, p in bayes.named_parameters())
    assert not any(isinstance(p, GaussianTensor) for p in bayes.module._parameters.values())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bayes.module.modules())


@torch.jit.script
def scripted_function(x: Tensor) -> Tensor:
    return torch.relu(x) * 2.0


@torch.no_grad()
def test_scripted_code_is_refused() -> None:
    with pytest.raises(NoRuleError, match="scripted"):
        propagated(network(between(scripted_function)), inputs())
    module = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(NoRuleError, match="scripted"):
        propagated(network(lambda net, x: net.last(net.extra(net.first(x))), module), inputs())


@pytest.mark.parametrize("layer", [nn.LSTM(6, 6, batch_first=True), nn.GRUCell(6, 6)])
def test_recurrent_layers_name_monte_carlo(layer: nn.Module) -> None:
    with pytest.raises(NoRuleError, match=r"extra.*bayes\.predict"):
        propagated(network(lambda net, x: net.last(net.first(x)), layer), inputs())


@torch.no_grad()
def test_invalid_moments_name_the_operator_and_module() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)

    with pytest.raises(InvalidMomentsError, match="'log' in module 'extra'"):
        propagated(network(lambda net, x: net.last(net.extra(net.first(x))), Logarithm()), inputs())


def test_dropout_and_flags_are_put_back() -> None:
    bayes = network(lambda net, x: net.last(net.extra(net.first(x))), nn.Dropout(0.5)).train()
    one, two = propagated(bayes, inputs()), propagated(bayes, inputs())
    assert torch.equal(one.mean, two.mean)
    assert all(m.training for m in bayes.modules())
    assert isinstance(bayes.module.first.weight, nn.Parameter)


@pytest.mark.parametrize("name", ["relu", "written", "own_gelu", "checkpointed", "written_beside"])
def test_gradients_reach_means_and_spreads(name: str) -> None:
    """Against finite differences, in double precision."""
    bayes = network(between(SMALL[name])).double()
    x = inputs().double()

    def value() -> Tensor:
        moments = propagated(bayes, x)
        return moments.mean.square().sum() + moments.variance.sum()

    value().backward()
    for parameter in (bayes.module.first.weight, bayes.posterior["first/weight"].log_sigma):
        with torch.no_grad():
            entry = parameter.view(-1)[3]
            entry += 1e-6
            up = float(value())
            entry -= 2e-6
            down = float(value())
            entry += 1e-6
        assert float(parameter.grad.view(-1)[3]) == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-7)


def test_a_write_that_gradients_cannot_take_is_loud() -> None:
    bayes = network(between(written_view))
    with pytest.raises(RuntimeError, match="inplace"):
        propagated(bayes, inputs()).variance.sum().backward()


@torch.no_grad()
def test_autocast() -> None:
    bayes = network(between(F.gelu))
    exact = propagated(bayes, inputs())
    with torch.autocast("cpu", torch.bfloat16):
        low = propagated(bayes, inputs())
    assert low.mean.dtype == torch.bfloat16
    torch.testing.assert_close(low.mean.float(), exact.mean, atol=0.02, rtol=0.02)
    torch.testing.assert_close(low.variance.float(), exact.variance, atol=0.0, rtol=0.05)


@torch.no_grad()
def test_tied_weights_share_their_moments() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(x)))

    torch.manual_seed(0)
    bayes = dubito.bayesianize(Tied(), dubito.MeanField(scale=0.1))
    tokens = torch.arange(5)
    context = Context()
    moments = propagated(bayes, tokens, context)
    draws = bayes.outputs(tokens, samples=3000)
    assert context.seen == {"table.weight"}
    off = ~torch.eye(5, 7, dtype=torch.bool)  # on the diagonal a weight meets itself, which no rule can see
    ratio = (moments.variance / draws.var(0))[off]
    assert float(ratio.min()) > 0.85
    assert float(ratio.max()) < 1.15


# ---- sites ----------------------------------------------------------------------------------------------------


class Halves:
    """A calibration: alpha 0.5 before every activation, rho 1 at pooling."""

    def alpha(self, site: str) -> float | None:
        return 0.5 if site.endswith(":activation") else None

    def rho(self, site: str) -> float | None:
        return 1.0 if ":pool" in site else None


def sites_of(bayes: dubito.BayesianModule, calibration: Any = None) -> dict[str, Moments]:
    sites: dict[str, Moments] = {}
    with torch.no_grad():
        propagated(bayes, inputs(), Context(record=sites.__setitem__, calibration=calibration))
    return sites


def twice(net: Net, x: Tensor) -> Tensor:
    hidden = net.extra(net.first(x))
    return net.last(F.layer_norm(net.extra(hidden), (6,)).unsqueeze(1).expand(-1, 4, -1).mean(1))


def test_sites_are_named_by_module_kind_and_use() -> None:
    bayes = network(twice, nn.GELU())
    names = ["extra:activation", "extra:activation#1", ":norm", ":pool", ":output"]
    assert list(sites_of(bayes)) == names
    assert list(sites_of(bayes)) == names


def test_calibration_acts_at_its_sites() -> None:
    bayes = network(twice, nn.GELU())
    plain, halved = sites_of(bayes), sites_of(bayes, Halves())
    torch.testing.assert_close(plain["extra:activation"].variance, halved["extra:activation"].variance)
    first = plain["extra:activation"]
    mean, _ = dubito.moments.activation_moments.gelu_moments(first.mean, 0.5 * first.variance)
    torch.testing.assert_close(halved["extra:activation#1"].mean, mean)
    one, other = propagated_with(bayes, None), propagated_with(bayes, Halves())
    assert not torch.allclose(one.variance, other.variance)


def propagated_with(bayes: dubito.BayesianModule, calibration: Any) -> Moments:
    with torch.no_grad():
        return propagated(bayes, inputs(), Context(calibration=calibration))


def test_rho_of_one_takes_pooled_entries_as_one() -> None:
    """Four equal copies averaged: with rho 1 the variance of one of them, with rho 0 a quarter of it."""
    bayes = network(lambda net, x: net.first(x).unsqueeze(1).expand(-1, 4, -1).mean(1))
    single = propagated_with(network(lambda net, x: net.first(x)), None)
    torch.testing.assert_close(propagated_with(bayes, None).variance, single.variance / 4)
    torch.testing.assert_close(propagated_with(bayes, Halves()).variance, single.variance)


def test_a_draw_passes_the_same_sites() -> None:
    bayes = network(twice, nn.GELU())
    draw: dict[str, Tensor] = {}
    for posterior in bayes.posteriors():
        draw.update(posterior.draw())
    sites: dict[str, Moments] = {}
    with torch.no_grad():
        output = sites_of_draw(bayes, inputs(), draw, sites.__setitem__)
        expected = bayes.select(bayes.run(draw, (inputs(),), {}))
    torch.testing.assert_close(output, expected)
    assert list(sites) == list(sites_of(bayes))
    torch.testing.assert_close(sites[":output"].mean, expected)


def test_swaps_nest_and_are_undone() -> None:
    bayes = network(between(F.relu))
    context = Context()
    with standing_in(bayes, gaussian_weights(bayes), context):
        assert isinstance(bayes.module.first.weight, GaussianTensor)
        torch.testing.assert_close(propagated(bayes, inputs()).mean.shape, torch.Size((4, 3)))
    assert isinstance(bayes.module.first.weight, nn.Parameter)
