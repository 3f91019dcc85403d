"""Structured drawn weights: fallback to the dense draw, metadata, and three silent failures made loud."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.weights.drawn import DrawnWeight, as_dense
from dubito.weights.drawn_factors import FactoredWeight
from dubito.weights.drawn_gaussian import FlipoutWeight, LocalWeight

FAMILIES: dict[str, dubito.Family] = {
    "factors": dubito.LowRankFactors(rank=2, init="svd"),
    "local": dubito.MeanField(estimator="local"),
    "flipout": dubito.MeanField(estimator="flipout"),
}


def drawn(kind: str, requires_grad: bool = True) -> DrawnWeight:
    torch.manual_seed(0)
    if kind == "factors":
        parts = torch.randn(4, 2, requires_grad=requires_grad), torch.randn(3, 2, requires_grad=requires_grad)
        return FactoredWeight.of(*parts, (4, 3))
    parts = torch.randn(4, 3, requires_grad=requires_grad), torch.rand(4, 3)
    return LocalWeight.of(*parts) if kind == "local" else FlipoutWeight.of(*parts)


class Own(torch.autograd.Function):
    """A linear layer as somebody's autograd Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return None, grad.mT @ x


class ByFunction(nn.Module):
    def __init__(self, clone: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.clone = clone

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Own.apply(x, self.weight.clone() if self.clone else self.weight)
        return output


def bayesian(module: nn.Module, kind: str) -> dubito.BayesianModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        return dubito.bayesianize(module, FAMILIES[kind])


@pytest.mark.filterwarnings("ignore:estimator=:dubito.DubitoWarning")
@pytest.mark.parametrize("kind", FAMILIES)
def test_an_autograd_function_raises_rather_than_losing_the_gradient(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"gradient reached a structured drawn weight.*weight\.clone\(\)"):
        bayesian(ByFunction(clone=False), kind)(x).sum().backward()
    bayes = bayesian(ByFunction(clone=True), kind)  # the remedy that the message names
    bayes(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in bayes.parameters())
    plain = dubito.bayesianize(ByFunction(clone=False), dubito.MeanField())  # and the other one
    plain(x).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in plain.parameters())


WRITES = {
    "mul_": lambda w: w.mul_(2.0),
    "+=": lambda w: w.__iadd__(1.0),
    "setitem": lambda w: w.__setitem__(0, 0.0),
    "copy_": lambda w: w.copy_(torch.zeros(4, 3)),
    "init": lambda w: nn.init.zeros_(w),
    "out": lambda w: torch.add(torch.ones(4, 3), 1.0, out=w),
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("write", WRITES)
def test_writing_into_a_drawn_weight_raises(kind: str, write: str) -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                WRITES[write](self.weight)
            return super().forward(x)

    bayes = bayesian(Writes(3, 4), kind)
    before = {n: p.clone() for n, p in bayes.named_parameters()}
    with pytest.raises(RuntimeError, match=r"writes into a drawn weight.*vanish.*clone"):
        bayes(torch.ones(1, 3))
    assert all(torch.equal(p, before[n]) for n, p in bayes.named_parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_metadata_answers_without_drawing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(kind)

    def fail(_: DrawnWeight) -> Tensor:
        raise AssertionError("drew to answer")

    monkeypatch.setattr(type(weight), "draw_dense", fail)
    assert weight.shape == (4, 3)
    assert weight.size(0) == 4
    assert weight.dim() == weight.ndim == 2
    assert weight.numel() == 12
    assert len(weight) == 4
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert weight.requires_grad
    assert weight.is_floating_point()
    assert not weight.is_cuda
    assert isinstance(hash(weight), int)
    assert type(weight).__name__ in repr(weight)
    assert not drawn(kind, requires_grad=False).requires_grad or kind == "other"
    with torch.no_grad():
        assert not drawn(kind).requires_grad


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_other_operator_gets_one_dense_draw(kind: str) -> None:
    weight = drawn(kind)
    dense = weight.dense()
    assert type(dense) is Tensor
    assert torch.equal(weight + 1.0, dense + 1.0)
    assert torch.equal(weight.sum(), dense.sum())
    assert torch.equal(torch.linalg.norm(weight), torch.linalg.norm(dense))
    assert torch.equal(torch.cat([weight, weight]), torch.cat([dense, dense]))
    assert as_dense(weight) is dense
    assert as_dense(3) == 3


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_draw_made_without_gradient_is_not_used_where_gradient_is_wanted(kind: str) -> None:
    weight = drawn(kind)
    with torch.no_grad():
        assert not weight.dense().requires_grad
    assert weight.dense().requires_grad
    with torch.no_grad():
        assert torch.equal(weight.dense(), weight.dense())


def test_below_torch_function_it_raises() -> None:
    weight = drawn("factors")
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(RuntimeError, match=r"below __torch_function__"),
    ):
        _ = weight + 1.0


def test_scripted_code_does_not_compute_something_else_in_silence() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    net = nn.Sequential(nn.Linear(3, 4), scripted)  # a scripted neighbour is no trouble
    bayes = dubito.bayesianize(net, {"0": dubito.LowRankFactors(2, init="svd")})
    x = torch.ones(1, 3)
    assert not torch.equal(bayes(x), bayes(x))
    with pytest.raises(TypeError, match=r"'1\.weight' belongs to a scripted module"):
        dubito.bayesianize(nn.Sequential(nn.Linear(3, 4), scripted), dubito.MeanField())


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_runs_on_structured_weights(kind: str) -> None:
    """The functional form needs no dense in-projection: same result as with the dense draw."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4)
    bayes = bayesian(attention, kind)
    values = {}
    for posterior in bayes.posteriors():
        values.update(posterior.realize(posterior.components(posterior.noise())))
    output = bayes.run(values, (x, x, x), {})[0]
    dense = {n: as_dense(v).detach() for n, v in values.items()}
    fresh = nn.MultiheadAttention(4, 2, batch_first=True)
    expected = torch.func.functional_call(fresh, dense, (x, x, x))[0]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_ordinary_functions_of_a_drawn_weight_carry_gradient() -> None:
    weight = drawn("factors")
    (F.normalize(weight, dim=1).sum() + weight.square().mean()).backward()
    assert isinstance(weight, FactoredWeight)
    assert weight.left.grad is not None
    assert weight.right.grad is not None
