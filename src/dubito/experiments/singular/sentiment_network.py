"""A Transformer encoder for sentences, from scratch: layer norm before each part (pre-norm), no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0  #: number of the piece that fills up short sentences
#: Weight matrices of an `Encoder` to be factored: the embedding, the four maps of attention, both of each feed-forward.
FACTORED = (
    "words.weight",
    "layers.*.attention.query.weight",
    "layers.*.attention.key.weight",
    "layers.*.attention.value.weight",
    "layers.*.attention.output.weight",
    "layers.*.inner.weight",
    "layers.*.outer.weight",
)


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an `Encoder`; the default is the small one of the experiment, `PAPER` the paper's.

    Attributes:
        vocabulary: V, number of pieces.
        length: T, longest sentence in pieces.
        width: d.
        inner: width of the feed-forward parts.
        heads: of the attention; they divide the width.
        layers: how many.
        pooling: what represents the sentence: the first piece ("start") or the mean over all but padding ("mean").
        classes: C.
    """

    vocabulary: int
    length: int = 32
    width: int = 64
    inner: int = 128
    heads: int = 4
    layers: int = 4
    pooling: Literal["start", "mean"] = "start"
    classes: int = 2

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.pooling not in ("start", "mean"):
            raise ValueError(f'pooling={self.pooling!r} must be "start" or "mean"')


def paper_shape(vocabulary: int) -> EncoderShape:
    """The paper's network for SST-2: width 256, feed-forward 512, 64 pieces a sentence."""
    return EncoderShape(vocabulary, length=64, width=256, inner=512)


class Attention(nn.Module):
    """Multi-head self-attention of four plain linear maps, so that any estimator of random weights applies."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """(batch, T, d) to the same; `present` (batch, 1, 1, T) is False where nothing may be attended to."""
        queries, keys, values = (
            made.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for made in (self.query(x), self.key(x), self.value(x))
        )
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=present)
        output: Tensor = self.output(attended.transpose(-2, -3).flatten(-2))
        return output


class Layer(nn.Module):
    """Attention and a feed-forward part, each on normalised inputs and added to what it was given."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads)
        self.before_inner = nn.LayerNorm(shape.width)
        self.inner = nn.Linear(shape.width, shape.inner)
        self.outer = nn.Linear(shape.inner, shape.width)

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        """(batch, T, d) to the same."""
        x = x + self.attention(self.before_attention(x), present)
        added: Tensor = self.outer(F.gelu(self.inner(self.before_inner(x))))
        return x + added


class Encoder(nn.Module):
    """Numbers of pieces (batch, T) to logits (batch, C).

    Padding is never attended to, nor averaged over. Embeddings start with entries of variance 1/d, rows of unit
    length, which is the scale that `dubito`'s priors presume of them.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)
        for table in (self.words.weight, self.positions):
            nn.init.normal_(table, std=shape.width**-0.5)

    def forward(self, pieces: Tensor) -> Tensor:
        """Logits; T may be anything up to the network's length.

        Raises:
            ValueError: for sentences longer than the network's length, or of another shape.
        """
        if pieces.ndim != 2 or pieces.shape[1] > self.shape.length:
            raise ValueError(
                f"pieces must be (batch, T) with T at most {self.shape.length}; got {tuple(pieces.shape)}"
            )
        present = pieces != PADDING
        present[:, 0] = True  # a sentence of nothing else would have nothing to attend to, and give NaN
        x = self.words(pieces) + self.positions[: pieces.shape[1]]
        for layer in self.layers:
            x = layer(x, present[:, None, None, :])
        logits: Tensor = self.head(self.norm(self._pooled(x, present)))
        return logits

    def _pooled(self, x: Tensor, present: Tensor) -> Tensor:
        if self.shape.pooling == "start":
            return x[..., 0, :]
        weights = present.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(-2) / weights.sum(-2).clamp_min(1.0)
