"""The Transformer encoder of the sentiment experiment."""

from fnmatch import fnmatch

import pytest
import torch
from torch import nn

import dubito
from dubito.experiments.singular.sentiment_network import FACTORED, Encoder, EncoderShape, paper_shape

SHAPE = EncoderShape(50, length=10, width=16, inner=24, heads=4, layers=2)


def pieces(batch: int = 3, length: int = 10) -> torch.Tensor:
    made = torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(0))
    made[:, 0] = 2
    return made


def encoder(shape: EncoderShape = SHAPE) -> Encoder:
    torch.manual_seed(0)
    return Encoder(shape)


@pytest.mark.parametrize("pooling", ["start", "mean"])
def test_padding_changes_nothing(pooling: str) -> None:
    network = encoder(EncoderShape(50, 10, 16, 24, pooling=pooling)).eval()  # type: ignore[arg-type]
    short = pieces(length=6)
    padded = torch.cat([short, torch.zeros(3, 4, dtype=torch.long)], 1)
    torch.testing.assert_close(network(short), network(padded))
    assert not torch.allclose(network(short), network(pieces()))


def test_it_is_torchs_own_pre_norm_encoder() -> None:
    network = encoder()
    for table in network.layers:  # the defaults of norms would hide their places
        for norm in (table.before_attention, table.before_inner):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    x = pieces()
    x[1, 7:] = 0
    expected = network.words(x) + network.positions
    for layer in network.layers:
        other = nn.TransformerEncoderLayer(
            16, 4, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        attention = layer.attention
        maps = (attention.query, attention.key, attention.value)
        other.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([m.weight for m in maps]),
                "self_attn.in_proj_bias": torch.cat([m.bias for m in maps]),
                **{f"self_attn.out_proj.{k}": v for k, v in attention.output.state_dict().items()},
                **{f"linear1.{k}": v for k, v in layer.inner.state_dict().items()},
                **{f"linear2.{k}": v for k, v in layer.outer.state_dict().items()},
                **{f"norm1.{k}": v for k, v in layer.before_attention.state_dict().items()},
                **{f"norm2.{k}": v for k, v in layer.before_inner.state_dict().items()},
            }
        )
        expected = other(expected, src_key_padding_mask=x == 0)
    expected = network.head(network.norm(expected[:, 0]))
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def factored(estimator: str, rank: int = 3) -> dubito.BayesianModule:
    families = dict.fromkeys(FACTORED, dubito.LowRankFactors(rank, "random", estimator=estimator))  # type: ignore[arg-type]
    rest = dubito.MeanField(estimator=estimator)  # type: ignore[arg-type]
    torch.manual_seed(1)
    return dubito.bayesianize(encoder(), {**families, "rest": rest}, likelihood=dubito.Categorical())


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_every_random_weight_gets_its_gradient(estimator: str) -> None:
    bayes = factored(estimator).train()
    loss = bayes.nll(bayes(pieces()), torch.tensor([0, 1, 1])).mean() + bayes.kl() / 100
    loss.backward()
    missing = [name for name, p in bayes.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    assert all(bool(torch.isfinite(p.grad).all()) for p in bayes.parameters() if p.grad is not None)


def test_matrices_are_factored_and_count_as_the_formula_says() -> None:
    bayes = factored("weights")
    low_rank = [p for p in bayes.posteriors() if type(p).__name__ == "LowRankFactorsPosterior"]
    assert len(low_rank) == 1 + 6 * 2
    numbers = sum(v.numel() for p in low_rank for v in p.parameters())
    assert numbers == 2 * 3 * ((50 + 16) + 2 * (4 * (16 + 16) + 2 * (16 + 24)))


def test_kl_counts_every_row_of_the_embedding_whatever_the_batch() -> None:
    bayes = factored("weights").train()
    kls = []
    for x in (pieces(1, 2), pieces(3)):
        bayes(x)
        kls.append(bayes.kl_by_parameter()["words.weight"])
    torch.testing.assert_close(kls[0], kls[1])
    assert float(kls[0].detach()) > 0


def test_draws_at_once_are_draws_one_by_one() -> None:
    bayes = factored("weights").eval()
    x = pieces()
    draws = bayes.draw(4, torch.Generator().manual_seed(0))
    together = bayes.outputs(x, draws=draws)
    alone = torch.cat([bayes.outputs(x, draws=draws[i]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert float(together.std(0).min()) > 0


def test_sentences_of_nothing_but_padding_give_numbers() -> None:
    assert bool(torch.isfinite(encoder()(torch.zeros(2, 10, dtype=torch.long))).all())


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="T at most 10"):
        encoder()(pieces(length=10).repeat(1, 2))
    with pytest.raises(ValueError, match="multiple of heads"):
        EncoderShape(50, width=10, heads=4)
    with pytest.raises(ValueError, match="pooling"):
        EncoderShape(50, pooling="max")  # type: ignore[arg-type]


def test_the_papers_count() -> None:
    """1,443,648 variational parameters of factors at rank 16 and a vocabulary of 30,522, as the paper's table."""
    network = Encoder(paper_shape(300))  # the vocabulary counts by its rows alone
    found = [p.shape for name, p in network.named_parameters() if any(fnmatch(name, one) for one in FACTORED)]
    assert 2 * 16 * (sum(sum(shape) for shape in found) + 30522 - 300) == 1_443_648
