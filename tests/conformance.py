"""What the conformance battery runs over: families of random weights, and kinds of modules.

A new family gets the whole battery by one line in `FAMILIES`, a new kind of module by one line in `KINDS`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Family, LowRankCovariance, LowRankFactors, MeanField, Point
from dubito.weights.slots import find_slots

FAMILIES: dict[str, Family] = {
    "mean_field": MeanField(scale=0.3),
    "mean_field_local": MeanField(scale=0.3, estimator="local"),
    "mean_field_flipout": MeanField(scale=0.3, estimator="flipout"),
    "mean_field_softplus": MeanField(scale=0.3, parametrization="softplus"),
    "low_rank_covariance": LowRankCovariance(rank=2),
    "diagonal_covariance": dubito.DiagonalCovariance(scale=0.3),
    "kronecker_covariance": dubito.KroneckerCovariance(rank_in=2, rank_out=2),
    "factors_random": LowRankFactors(rank=2, init="random"),
    "factors_svd": LowRankFactors(rank=1, init="svd", scale=0.3),
    "factors_local": LowRankFactors(rank=2, init="svd", estimator="local"),
    "factors_flipout": LowRankFactors(rank=2, init="svd", estimator="flipout"),
    "factors_laplace": LowRankFactors(rank=0.5, init="he", distribution="laplace", blocks="heads", scale=0.3),
    "factors_heads_local": LowRankFactors(rank=1, init="svd", estimator="local", blocks="heads"),
    "radial": dubito.Radial(scale=0.3),
    "rank_one": dubito.RankOne(scale=0.3, train_weight=True),
    "full_covariance_unit": dubito.FullCovariance("unit", scale=0.3),
    "full_covariance": dubito.FullCovariance("layer", scale=0.3),
    "point": Point(),
}


@dataclass(frozen=True)
class Kind:
    """A module to be made Bayesian, and an input for it.

    Attributes:
        make: makes the module (under the caller's seed).
        shape: shape of a real-valued input, without the batch.
        tokens: the input is tokens below this number instead.
        loops: it has an operator without a batching rule, so many draws run in a loop.
        half: whether PyTorch runs it in bfloat16 on the CPU.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int | None = None
    loops: bool = False
    half: bool = True

    def input(self, batch: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
        """An input; every token occurs twice at least where there are few."""
        generator = torch.Generator().manual_seed(5)
        if self.tokens is not None:
            return torch.randint(0, self.tokens, (batch, *self.shape), generator=generator)
        return torch.randn(batch, *self.shape, generator=generator).to(dtype)


class Sequence(nn.Module):
    """A recurrent network read out at every step."""

    def __init__(self, rnn: nn.RNNBase, features: int) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not self.rnn.batch_first:
            x = x.transpose(0, 1)
        output: Tensor = self.head(self.rnn(x)[0])
        return output if self.rnn.batch_first else output.transpose(0, 1)


class Cells(nn.Module):
    """An LSTM cell called once a step: a weight used several times in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return state[0]


class Attention(nn.Module):
    """Attention of a sequence to itself, or to a projection of it with other sizes of keys and values."""

    def __init__(self, other: bool, **options: Any) -> None:
        super().__init__()
        sizes = {"kdim": 6, "vdim": 6} if other else {}
        self.memory = nn.Linear(4, 6) if other else nn.Identity()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        output: Tensor = self.attention(x, memory, memory, need_weights=False)[0]
        return output


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.body(self.embedding(tokens)).tanh())
        return output


def chain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def with_head(*modules: nn.Module, features: int) -> nn.Sequential:
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(features, 2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=12, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
            max_position_embeddings=8, num_labels=3, attn_implementation="eager",
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8,
            patch_size=4, num_channels=1, num_labels=3,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=3
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False)
    )


C1, C2, C3 = nn.Conv1d, nn.Conv2d, nn.Conv3d
T1, T2, T3 = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
encoder_layer = functools.partial(nn.TransformerEncoderLayer, 4, 2, 6, batch_first=True)

KINDS: dict[str, Kind] = {
    "mlp": Kind(lambda: chain(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "mlp_no_bias": Kind(lambda: chain(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)), (5,)),
    "conv1d": Kind(lambda: C1(4, 4, 3, groups=2, dilation=2), (4, 8)),
    "conv1d_circular": Kind(lambda: C1(3, 4, 3, padding=1, padding_mode="circular"), (3, 5)),
    "conv2d": Kind(lambda: chain(C2(2, 4, (3, 2), stride=2), nn.ReLU(), C2(4, 4, 2, groups=2)), (2, 8, 7)),
    "conv2d_same": Kind(lambda: C2(3, 4, (3, 1), padding="same", dilation=2), (3, 5, 4)),
    "conv2d_circular": Kind(lambda: C2(4, 4, (3, 2), padding="same", padding_mode="circular"), (4, 5, 4)),
    "conv3d": Kind(lambda: C3(2, 4, (2, 1, 3), groups=2), (2, 4, 3, 5)),
    "conv_transpose1d": Kind(lambda: T1(4, 4, 3, stride=2, output_padding=1, dilation=2), (4, 4)),
    "conv_transpose2d": Kind(lambda: T2(4, 6, (3, 2), stride=2, groups=2, padding=1), (4, 3, 4)),
    "conv_transpose3d": Kind(lambda: T3(4, 3, (2, 1, 3)), (4, 3, 2, 3)),
    "embedding": Kind(
        lambda: with_head(nn.Embedding(7, 4, padding_idx=0), nn.Tanh(), features=16), (4,), tokens=7
    ),
    "tied": Kind(Tied, (4,), tokens=7),
    "lstm": Kind(
        lambda: Sequence(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2), 4), (4, 3), loops=True
    ),
    "lstm_no_bias": Kind(lambda: Sequence(nn.LSTM(3, 4, bias=False), 4), (4, 3), loops=True),
    "gru": Kind(lambda: Sequence(nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), 8), (4, 3), loops=True),
    "lstm_cell": Kind(Cells, (3, 3), loops=True),
    "attention": Kind(lambda: Attention(other=False, add_bias_kv=True), (4, 4)),
    "attention_other_sizes": Kind(lambda: Attention(other=True), (4, 4)),
    "encoder_layer": Kind(lambda: encoder_layer(dropout=0.2), (4, 4)),
    "encoder_layer_norm_first": Kind(lambda: encoder_layer(norm_first=True, activation="gelu"), (4, 4)),
    "batch_norm": Kind(
        lambda: with_head(C2(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), features=36), (1, 5, 5)
    ),
    "layer_norm": Kind(lambda: chain(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)), (5,)),
    "group_norm": Kind(
        lambda: with_head(C1(2, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), features=16), (2, 5)
    ),
    "bert": Kind(bert, (5,), tokens=12),
    "vit": Kind(vit, (1, 8, 8)),
    "resnet": Kind(resnet, (1, 16, 16)),
    "gpt2": Kind(gpt2, (5,), tokens=12),
}  # fmt: skip


@functools.cache
def _prototype(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = KINDS[kind].make()
    with torch.no_grad():  # what starts at zero or one is a poor witness
        for parameter in module.parameters():
            if bool((parameter == parameter.reshape(-1)[0]).all()):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif float(parameter.std()) < 0.1:
                parameter.mul_(0.3 / float(parameter.std()))
    return module


def plain(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module itself, the same for the same seed."""
    return copy.deepcopy(_prototype(kind, seed)).to(dtype)


def families_of(family: Family, module: nn.Module) -> Any:
    """The family for every parameter; a tied one draws weights, since outputs cannot be drawn for it."""
    if getattr(family, "estimator", None) != "local":
        return family
    shared = dataclasses.replace(family, estimator="weights")  # type: ignore[call-arg]
    tied: dict[str, Family] = {slot.name: shared for slot in find_slots(module) if slot.tied}
    return {**tied, "rest": family}


def bayesian(
    family: str, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dubito.BayesianModule:
    """A Bayesian module of that family and kind; dropout and normalisation behave as in evaluation."""
    module = plain(kind, seed, dtype)
    torch.manual_seed(seed + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)  # ranks clipped, on purpose
        bayes = dubito.bayesianize(
            module, families_of(FAMILIES[family], module), likelihood=dubito.Gaussian()
        )
    bayes.train()
    bayes.module.eval()
    return bayes
