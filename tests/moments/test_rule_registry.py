"""The table of rules: rules by users, names, errors; the report; the predictive of a propagation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.moments import Context, InvalidMomentsError, Moments, NoRuleError, propagated, report, rule
from dubito.moments.registry import BY_FUNCTION, BY_NAME, is_elementwise, name_of, resolve
from dubito.moments.rule_sets import RuleSet, rule_set


class Through(nn.Module):
    """A linear layer, a function, a linear layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def through(function: Any, likelihood: dubito.Likelihood | None = None) -> dubito.BayesianModule:
    torch.manual_seed(0)
    return dubito.bayesianize(Through(function), dubito.MeanField(scale=0.2), likelihood=likelihood)


@pytest.fixture
def table() -> Iterator[None]:
    """Puts the table back."""
    before = dict(BY_FUNCTION), dict(BY_NAME)
    yield
    for mapping, saved in zip((BY_FUNCTION, BY_NAME), before, strict=True):
        mapping.clear()
        mapping.update(saved)
    resolve.cache_clear()


# ---- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "add"),
        (Tensor.__iadd__, "add_"),
        (Tensor.__radd__, "radd"),
        (Tensor.__rtruediv__, "rdiv"),
        (Tensor.relu_, "relu_"),
        (Tensor.T.__get__, "T"),
        (torch.ops.aten.add_.Tensor, "add_"),
        (torch.ops.aten.softmax.int, "softmax"),
    ],
)
def test_names(function: Any, name: str) -> None:
    assert name_of(function) == name


def test_one_rule_for_every_way_of_calling() -> None:
    ways = [torch.relu, Tensor.relu, Tensor.relu_, torch.ops.aten.relu.default, torch.ops.aten.relu_.default]
    rules = [resolve(way) for way in ways]
    assert all(r is not None and r.implementation is rules[0].implementation for r in rules)
    assert resolve(F.relu).implementation is rules[0].implementation
    assert resolve(torch.fft.fft) is None


def test_what_is_elementwise() -> None:
    assert is_elementwise(torch.sinc)
    assert is_elementwise(F.hardswish)
    assert not is_elementwise(torch.sort)
    assert not is_elementwise(torch.round)  # whose derivative says nothing
    assert not is_elementwise(torch.gt)


# ---- rules by users -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_users_rule_serves_functions_methods_and_graphs(table: None) -> None:
    bayes = through(lambda h: h.sort(-1)[0])
    x = torch.randn(5, 4)
    with pytest.raises(NoRuleError, match=r"'sort'.*@dubito\.moments\.rule"):
        propagated(bayes, x)
    assert [use.operator for use in report(bayes, x).missing] == ["sort"]

    @rule(torch.sort, note="order of the means")
    def sort(
        context: Context, input: Moments, dim: int = -1, descending: bool = False
    ) -> tuple[Moments, Tensor]:
        values, order = input.mean.sort(dim, descending)
        return Moments(values, input.variance.gather(dim, order)), order

    first = propagated(bayes, x)
    assert bool((first.variance > 0).all())
    said = report(bayes, x)
    assert said.complete
    assert [(u.operator, u.note) for u in said.approximate] == [("sort", "order of the means")]
    other = propagated(through(lambda h: torch.sort(h, -1).values if False else torch.sort(h, -1)[0]), x)
    torch.testing.assert_close(other.variance, first.variance)


@torch.no_grad()
def test_a_users_rule_replaces_the_librarys(table: None) -> None:
    x = torch.randn(5, 4)
    before = propagated(through(torch.relu), x)

    @rule(torch.relu, exactness="exact")
    def doubled(context: Context, input: Moments) -> Moments:
        return Moments(2 * input.mean, 4 * input.variance)

    for way in (torch.relu, Tensor.relu, F.relu, nn.ReLU(inplace=True)):
        after = propagated(through(way), x)
        linear = propagated(through(lambda h: 2 * h), x)
        torch.testing.assert_close(after.mean, linear.mean)
        assert not torch.allclose(after.mean, before.mean)


@torch.no_grad()
def test_invalid_results_of_users_rules_are_named(table: None) -> None:
    @rule(torch.sort)
    def negative(context: Context, input: Moments, dim: int = -1) -> tuple[Moments, None]:
        return Moments(input.mean, -input.variance), None

    with pytest.raises(InvalidMomentsError, match=r"'sort' in module 'function'.*30 variances"):
        propagated(through(Sorted()), torch.randn(5, 4))


class Sorted(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.sort(h)[0]


def test_rule_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="operators"):
        rule()
    with pytest.raises(TypeError, match="operators"):
        rule("relu")
    with pytest.raises(ValueError, match="exactness"):
        rule(torch.sort, exactness="good")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="site"):
        rule(torch.sort, site="pool")


def test_rule_sets_by_name() -> None:
    assert rule_set("cvp") == RuleSet("cvp", "moments", "jacobian", "delta")
    assert rule_set("cvp-paper").normalization == "expected-scale"
    assert rule_set("streamlining").activation == "delta"
    changed = rule_set("cvp", attention="mean")
    assert (changed.attention, changed.normalization) == ("mean", "jacobian")
    with pytest.raises(ValueError, match="'cvp-paper'"):
        rule_set("swag")
    with pytest.raises(ValueError, match="normalization='none'"):
        rule_set("cvp", normalization="none")
    with pytest.raises(TypeError, match="RuleSet"):
        rule_set(3)  # type: ignore[arg-type]


@torch.no_grad()
def test_first_order_is_the_mean_network_and_its_jacobian() -> None:
    """The baseline against the Jacobian of each layer at the mean."""
    bayes = through(torch.tanh)
    x = torch.randn(2, 4)
    moments = propagated(bayes, x, Context(rule_set("streamlining")))
    bayes.eval()
    torch.testing.assert_close(moments.mean, bayes(x))
    first, last = bayes.module.first, bayes.module.last
    v1, v2 = (bayes.posterior[f"{n}/weight"].variance()[f"{n}.weight"] for n in ("first", "last"))
    b1, b2 = (bayes.posterior[f"{n}/bias"].variance()[f"{n}.bias"] for n in ("first", "last"))
    hidden = first(x)
    spread = F.linear(x.square(), v1, b1) * (1 - hidden.tanh().square()).square()
    expected = F.linear(spread, last.weight.square() + v2, b2) + F.linear(hidden.tanh().square(), v2)
    torch.testing.assert_close(moments.variance, expected)


# ---- report ---------------------------------------------------------------------------------------------------


def test_report_of_a_plain_module() -> None:
    module = Through(nn.GELU())
    before = [p.clone() for p in module.parameters()]
    said = report(module, torch.randn(1, 4))
    assert said.complete
    assert said.source == "export"
    assert said.unused == ()
    assert [(u.path, u.operator) for u in said.exact] == [("first", "linear"), ("last", "linear")]
    assert [(u.path, u.operator) for u in said.approximate] == [("function", "gelu")]
    text = str(said)
    assert "3 operators on random tensors: 2 exact, 1 approximate, 0 none (exported graph)" in text
    assert "first, last" in text
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())


def test_report_goes_on_after_an_operator_without_a_rule() -> None:
    class Two(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return torch.cumprod(torch.sort(h)[0], -1)

    said = report(Through(Two()), torch.randn(3, 4))
    assert not said.complete
    assert [(u.path, u.operator) for u in said.missing] == [("function", "sort"), ("function", "cumprod")]
    assert "no rule" in str(said)


def test_report_names_unused_parameters_and_traces_what_cannot_be_exported() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) if float(x.sum()) > -1e9 else self.idle(x)

    said = report(Branches(), torch.randn(3, 4))
    assert said.source == "trace"
    assert said.unused == ("idle.weight", "idle.bias")
    assert "torch.export failed" in str(said)
    assert "nothing used: idle.weight" in str(said)
    assert said.complete


# ---- predictives ----------------------------------------------------------------------------------------------


def test_propagate_streams_a_loader() -> None:
    bayes = through(F.relu, dubito.Categorical())
    x, y = torch.randn(10, 4), torch.randint(0, 3, (10,))
    whole = bayes.propagate(x)
    streamed = bayes.propagate(DataLoader(TensorDataset(x, y), batch_size=4))
    torch.testing.assert_close(streamed.probs, whole.probs)
    torch.testing.assert_close(streamed.logits_variance, whole.logits_variance)
    draws = bayes.predict(x, samples=2000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(whole.probs, draws.probs, atol=0.02, rtol=0.0)
    torch.testing.assert_close(whole.mutual_information, draws.mutual_information, atol=0.02, rtol=0.0)


def test_regression_undoes_the_targets_scale() -> None:
    bayes = through(F.relu, dubito.Gaussian(noise=0.5))
    x = torch.randn(6, 4)
    before = bayes.propagate(x)
    bayes.set_target_scale(torch.tensor(3.0), torch.tensor(2.0))
    after = bayes.propagate(x)
    torch.testing.assert_close(after.mean, 3.0 + 2.0 * before.mean)
    torch.testing.assert_close(after.epistemic, 4.0 * before.epistemic)
    moments = propagated(bayes, x)
    torch.testing.assert_close(before.epistemic, moments.variance.detach())


def test_propagate_checks_what_it_is_given() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="likelihood"):
        through(F.relu).propagate(x)
    bayes = through(F.relu, dubito.Categorical())
    with pytest.raises(ValueError, match="rules='nonsense'"):
        bayes.propagate(x, rules="nonsense")
    with pytest.raises(ValueError, match="head"):
        bayes.propagate(x, head="nonsense")
    with pytest.raises(ValueError, match="empty"):
        bayes.propagate([])
    fixed = dubito.bayesianize(Through(F.relu), dubito.Point(), likelihood=dubito.Categorical())
    with pytest.raises(dubito.CapabilityError, match="no parameter is random"):
        fixed.propagate(x)
    assert not bayes.propagate(x).probs.requires_grad
