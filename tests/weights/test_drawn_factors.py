"""Operators on factored weights give what they give on the dense product, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.weights.drawn_factors import EmbeddingRows, FactoredWeight

D = torch.float64


def operand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(9))


MATRIX: dict[str, tuple[Callable[[Any], Tensor], bool]] = {
    "linear": (lambda w: F.linear(operand(2, 6), w, operand(8)), True),
    "linear on a sequence": (lambda w: F.linear(operand(2, 3, 6), w), True),
    "linear on a vector": (lambda w: F.linear(operand(6), w), True),
    "addmm": (lambda w: torch.addmm(operand(6), operand(2, 8), w, beta=0.5, alpha=2.0), True),
    "matmul": (lambda w: operand(2, 8) @ w, True),
    "matmul left": (lambda w: w @ operand(6, 2), True),
    "matmul vector": (lambda w: w @ operand(6), True),
    "vector matmul": (lambda w: operand(8) @ w, True),
    "mm": (lambda w: torch.mm(operand(2, 8), w), True),
    "T": (lambda w: operand(2, 6) @ w.T, True),
    "mT": (lambda w: operand(2, 6) @ w.mT, True),
    "t": (lambda w: operand(2, 6) @ w.t(), True),
    "transpose": (lambda w: operand(2, 6) @ w.transpose(0, 1), True),
    "transpose negative": (lambda w: operand(2, 6) @ torch.transpose(w, -1, -2), True),
    "rows": (lambda w: F.linear(operand(2, 6), w[2:5]), True),
    "chunk": (lambda w: F.linear(operand(2, 6), w.chunk(2)[1]), True),
    "split": (lambda w: F.linear(operand(2, 6), w.split([2, 6])[1]), True),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 3, 3], [0, 1, 7]]), w), True),
    "embedding with padding": (lambda w: F.embedding(torch.tensor([1, 3, 0]), w, padding_idx=0), True),
    "embedding scaled": (lambda w: F.embedding(torch.tensor([1, 1]), w, scale_grad_by_freq=True), False),
    "chunk of columns": (lambda w: w.chunk(2, dim=1)[1] * 2.0, False),
    "one row": (lambda w: w[3] * 2.0, False),
    "transpose to itself": (lambda w: w.transpose(0, 0) * 2.0, False),
    "bilinear": (lambda w: F.bilinear(operand(2, 4), operand(2, 6), w.reshape(2, 4, 6)), False),
}
KERNELS: dict[str, tuple[Callable[[Any], Tensor], tuple[int, ...]]] = {
    "conv1d": (lambda w: F.conv1d(operand(2, 4, 7), w, operand(6), stride=2, padding=1), (6, 4, 3)),
    "conv1d groups": (lambda w: F.conv1d(operand(2, 8, 7), w, groups=2, dilation=2), (6, 4, 3)),
    "conv2d": (lambda w: F.conv2d(operand(2, 4, 6, 5), w, operand(6), (2, 1), (1, 0)), (6, 4, 3, 2)),
    "conv2d same": (lambda w: F.conv2d(operand(1, 4, 6, 5), w, padding="same", dilation=2), (6, 4, 3, 2)),
    "conv2d unbatched": (lambda w: F.conv2d(operand(4, 6, 5), w), (6, 4, 3, 2)),
    "conv3d": (lambda w: F.conv3d(operand(1, 4, 3, 4, 3), w, padding=(0, 1, 0)), (6, 4, 2, 3, 1)),
    "transposed 1d": (
        lambda w: F.conv_transpose1d(operand(2, 6, 5), w, stride=2, output_padding=1),
        (6, 4, 3),
    ),
    "transposed 2d": (
        lambda w: F.conv_transpose2d(operand(1, 6, 3, 2), w, operand(4), dilation=2),
        (6, 4, 3, 2),
    ),
    "transposed 2d groups": (lambda w: F.conv_transpose2d(operand(1, 6, 3, 2), w, groups=3), (6, 4, 3, 2)),
    "transposed 3d": (lambda w: F.conv_transpose3d(operand(1, 6, 2, 2, 2), w, padding=1), (6, 4, 2, 3, 2)),
}


def check(function: Callable[[Any], Tensor], shape: tuple[int, ...]) -> FactoredWeight:
    left = operand(shape[0], 2).requires_grad_()
    right = operand(torch.Size(shape).numel() // shape[0], 2).requires_grad_()
    weight = FactoredWeight.of(left, right, shape)
    output = function(weight)
    grads = torch.autograd.grad(output.sin().sum(), (left, right))
    expected = function((left @ right.mT).reshape(shape))
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for got, want in zip(grads, torch.autograd.grad(expected.sin().sum(), (left, right)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    return weight


@pytest.mark.parametrize("name", MATRIX)
def test_operators_on_matrices(name: str) -> None:
    function, structured = MATRIX[name]
    weight = check(function, (8, 6))
    assert (not weight._memo) == structured, "the dense weight is formed exactly where there is no rule"


@pytest.mark.parametrize("name", KERNELS)
def test_operators_on_kernels(name: str) -> None:
    function, shape = KERNELS[name]
    weight = check(function, shape)
    assert bool(weight._memo) == (name == "transposed 2d groups")


def test_a_padding_row_gets_no_gradient_in_either_factor() -> None:
    for make in ("factors", "rows"):
        left, right = operand(5, 2).requires_grad_(), operand(3, 2).requires_grad_()
        sd = torch.full_like(left, 0.1).requires_grad_()
        weight = (
            FactoredWeight.of(left, right, (5, 3)) if make == "factors" else EmbeddingRows.of(left, sd, right)
        )
        F.embedding(torch.tensor([4, 4]), weight, padding_idx=-1).sum().backward()
        assert left.grad is None or not left.grad.any()
        assert right.grad is None or not right.grad.any()


class TestEmbeddingRows:
    def table(self) -> EmbeddingRows:
        return EmbeddingRows.of(torch.zeros(6, 2, dtype=D), torch.ones(6, 2, dtype=D), operand(4, 2))

    def test_repeated_tokens_share_the_draw(self) -> None:
        table = self.table()
        output = F.embedding(torch.tensor([[3, 1, 3], [1, 1, 5]]), table)
        assert output.shape == (2, 3, 4)
        assert torch.equal(output[0, 0], output[0, 2])
        assert torch.equal(output[0, 1], output[1, 1])
        assert not torch.equal(output[0, 0], output[0, 1])
        again = F.embedding(torch.tensor([5, 3]), table)
        assert torch.equal(again[1], output[0, 0]), "and so does a second look-up of the same draw"
        assert torch.equal(table.dense()[5], again[0])

    def test_only_the_rows_looked_up_are_drawn(self) -> None:
        table = self.table()
        F.embedding(torch.tensor([3, 1, 3]), table)
        assert table.drawn.tolist() == [False, True, False, True, False, False]
        assert not table._memo

    def test_moments_of_the_rows(self) -> None:
        torch.manual_seed(0)
        mean, sd, right = operand(3, 2), torch.full((3, 2), 0.5, dtype=D), operand(4, 2)
        rows = torch.stack(
            [F.embedding(torch.tensor([2]), EmbeddingRows.of(mean, sd, right))[0] for _ in range(4000)]
        )
        covariance = 0.25 * right @ right.mT
        assert ((rows.mean(0) - mean[2] @ right.mT) / (covariance.diagonal() / 4000).sqrt()).abs().max() < 4.5
        torch.testing.assert_close(torch.cov(rows.mT), covariance, rtol=0.12, atol=0.05)

    def test_training_of_an_embedding_draws_only_rows_of_the_batch(self) -> None:
        bayes = dubito.bayesianize(nn.Embedding(50, 8), dubito.LowRankFactors(rank=2, init="svd"))
        (posterior,) = bayes.posteriors()
        (weight,) = posterior.training_weights().values()
        assert isinstance(weight, EmbeddingRows)
        bayes(torch.tensor([4, 4, 9])).sum().backward()
        spread = posterior.left_spread.grad
        assert spread is not None
        assert sorted(spread.abs().sum(1).nonzero().flatten().tolist()) == [4, 9]


@pytest.mark.parametrize("padding", [None, 0])
def test_an_embedding_under_vmap_draws_its_table_whole(padding: int | None) -> None:
    """Rows drawn as they are looked up depend on the tokens' values, which `vmap` hides."""
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.Embedding(9, 4, padding_idx=padding), dubito.LowRankFactors(2, init="svd"))
    tokens = torch.tensor([[1, 1, 2], [0, 1, 8]])
    rows = torch.func.vmap(bayes, randomness="same")(tokens)
    assert torch.equal(rows[0, 0], rows[0, 1])
    torch.testing.assert_close(rows[0, 0], rows[1, 1])
    assert (rows[0, 0] != bayes.eval()(tokens)[0, 0]).all()
    several = torch.func.vmap(bayes.train(), randomness="different")(tokens)
    assert (several[0, 0] != several[1, 1]).all()


@pytest.mark.parametrize("estimator", ["weights", "local"])
def test_shapes_without_values(estimator: Any) -> None:
    """On the meta device there is no mixed precision to ask about, and no token to look at."""
    for module, x in (
        (nn.Embedding(9, 4), torch.zeros(2, 3, dtype=torch.long)),
        (nn.LSTM(4, 3), torch.zeros(5, 2, 4)),
        (nn.Linear(4, 3), torch.zeros(2, 4)),
    ):
        bayes = dubito.bayesianize(module, dubito.LowRankFactors(1, init="svd", estimator=estimator)).to(
            "meta"
        )
        output = bayes(x.to("meta"))
        output = output[0] if isinstance(output, tuple) else output
        assert output.is_meta
        assert output.shape[:-1] == x.shape[: output.ndim - 1]
        assert bayes.kl().is_meta


def test_pieces_of_a_local_product_meet_different_inputs() -> None:
    torch.manual_seed(0)
    family = dubito.LowRankFactors(2, init="random", estimator="local")
    bayes = dubito.bayesianize(nn.MultiheadAttention(8, 2), family)
    x, memory = torch.randn(3, 1, 8), torch.randn(4, 1, 8)
    assert bayes(x, memory, memory)[0].isfinite().all()
    assert bayes(x, memory, memory.flip(0))[0].isfinite().all()
