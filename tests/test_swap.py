"""The swap: nested, restored whatever happens, whole under threads, remembered by activation checkpointing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dubito
from dubito.swap import Swap, watch_checkpointing
from dubito.weights.slots import find_slots

FAMILIES: dict[str, dubito.Family] = {
    "weights": dubito.MeanField(scale=0.5),
    "local": dubito.MeanField(scale=0.5, estimator="local"),
    "flipout": dubito.MeanField(scale=0.5, estimator="flipout"),
    "covariance": dubito.LowRankCovariance(2),
    "factors": dubito.LowRankFactors(2, init="svd"),
    "factors local": dubito.LowRankFactors(2, init="svd", estimator="local"),
}


class Blocks(nn.Module):
    """Two blocks with dropout, recomputed in backward or not."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, 1)
        self.mode = mode
        self.runs = 0

    def _count(self, *_: Any) -> None:
        self.runs += 1

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            again = self.mode == "reentrant"
            x = checkpoint(block, x, use_reentrant=again) if self.mode else block(x)  # type: ignore[assignment]
        output: Tensor = self.head(x)
        return output


def gradients(family: str, mode: str | None, between: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Blocks(mode)
    module.blocks[0].register_forward_pre_hook(module._count)
    bayes = dubito.bayesianize(module, FAMILIES[family])
    x = [torch.randn(4, 5, requires_grad=True) for _ in range(2)]
    torch.manual_seed(1)
    losses = [bayes(part).sin().sum() for part in x]  # two micro-batches pending, each with its own draw
    if between:
        with torch.no_grad():
            bayes.eval()(x[0])
        bayes.train()
    sum(losses, torch.zeros(())).backward()
    assert module.runs == (2 if mode is None else 4) + between
    assert all(type(p) is nn.Parameter for p in bayes.parameters())
    return {n: p.grad for n, p in bayes.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*break-even:dubito.DubitoWarning")
@pytest.mark.filterwarnings("ignore:.*clipped:dubito.DubitoWarning")
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_recomputes_with_the_same_draw(family: str, mode: str) -> None:
    expected, got = gradients(family, None), gradients(family, mode)
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    other = gradients(family, mode, between=True)
    for name, gradient in expected.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_checkpointing_without_a_swap_is_what_it_was() -> None:
    watch_checkpointing()
    watch_checkpointing()
    results = []
    for mode in (None, "reentrant", "non-reentrant"):
        torch.manual_seed(0)
        module, x = Blocks(mode), torch.randn(3, 5, requires_grad=True)
        module(x).sum().backward()
        results.append([p.grad for p in module.parameters()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b)


def test_swaps_nest_and_restore_through_exceptions() -> None:
    module = nn.Linear(2, 2)
    (weight, bias) = find_slots(module)
    own = module.weight
    outer, inner = torch.zeros(2, 2), torch.ones(2, 2)

    class Stop(Exception):
        pass

    with Swap([(weight, outer)], []):
        try:
            with Swap([(weight, inner), (bias, torch.ones(2))], []):
                assert torch.equal(module(torch.ones(1, 2)), torch.full((1, 2), 3.0))
                raise Stop
        except Stop:
            pass
        assert module._parameters["weight"] is outer
        assert type(module.bias) is nn.Parameter
    assert module._parameters["weight"] is own
    assert weight.held is None


def test_a_module_that_calls_itself_through_the_bayesian_one_is_restored() -> None:
    class Recursive(nn.Linear):
        again: Any = None

        def forward(self, x: Tensor) -> Tensor:
            call, self.again = self.again, None
            return super().forward(call(x) if call else x)

    module = Recursive(2, 2)
    bayes = dubito.bayesianize(module, dubito.MeanField())
    own = module.weight
    module.again = bayes
    bayes(torch.ones(1, 2)).sum().backward()
    assert module.weight is own


@pytest.mark.parametrize("family", ["weights", "factors"])
def test_threads_leave_the_module_whole_and_get_their_own_outputs(family: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    bayes = dubito.bayesianize(net, FAMILIES[family])
    own = {(id(m), n): id(p) for m in bayes.modules() for n, p in m._parameters.items()}
    x = torch.randn(3, 4)
    draws = [bayes.draw(2, torch.Generator().manual_seed(i)) for i in range(4)]
    frozen = [bayes.outputs(x, draws=d).detach() for d in draws]
    mean = bayes.merge()(x)
    failures: list[str] = []
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        barrier.wait()
        try:
            for _ in range(20):
                output = bayes.outputs(x, draws=draws[index])
                if not torch.allclose(output, frozen[index], atol=1e-6):
                    failures.append("another thread's draw")
                bayes(x).sum().backward() if index == 0 else bayes(x)
                if not torch.allclose(bayes.merge()(x), mean, atol=1e-6):
                    failures.append("merged in the middle of a call")
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {(id(m), n): id(p) for m in bayes.modules() for n, p in m._parameters.items()} == own
    assert torch.backends.mha.get_fastpath_enabled()


class Tokens(nn.Module):
    """An embedding inside a block that is run again, with dropout behind it."""

    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.embedding, self.head, self.mode = nn.Embedding(9, 6), nn.Linear(6, 1), mode

    def block(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(self.embedding(tokens), 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.block, tokens, use_reentrant=False) if self.mode else self.block(tokens)
        output: Tensor = self.head(x)
        return output


def test_rows_drawn_on_demand_and_the_dropout_behind_them_are_the_same_again() -> None:
    results = []
    for mode in (None, "non-reentrant"):
        torch.manual_seed(0)
        bayes = dubito.bayesianize(Tokens(mode), {"embedding": dubito.LowRankFactors(2, init="svd")})
        torch.manual_seed(1)
        bayes(torch.tensor([[1, 2, 2, 5]])).sin().sum().backward()
        results.append({n: p.grad for n, p in bayes.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, msg=name)


class Fallback(nn.Module):
    """Blocks that use weights by operators without rules, shared between them, each run again in backward."""

    def __init__(self, mode: str | None, blocks: int) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.randn(5, 5))
        self.mode, self.blocks = mode, blocks

    def block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(x) * self.scale.cos().sum(0), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.blocks):
            again = self.mode == "reentrant"
            x = checkpoint(self.block, x, use_reentrant=again) if self.mode else self.block(x)  # type: ignore[assignment]
        return x


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_draws_made_inside_a_checkpointed_block_are_the_same_again(family: str, mode: str) -> None:
    results = []
    # Reentrant checkpointing runs backward through a graph that two blocks share twice: torch's own, loud error.
    blocks = 1 if mode == "reentrant" and family != "local" else 2
    for choice in (None, mode):
        torch.manual_seed(0)
        bayes = dubito.bayesianize(Fallback(choice, blocks), FAMILIES[family])
        x = torch.randn(4, 5, requires_grad=True)
        torch.manual_seed(1)
        bayes(x).sin().sum().backward()
        results.append({n: p.grad for n, p in bayes.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
