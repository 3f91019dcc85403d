"""The four small networks: a ResNet, a ViT, a BERT, and one that compares two images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PADDING = 0  # number of the padding piece in a sentence


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with group normalisation around a shortcut, a 1×1 convolution where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(N, inputs, H, W)` to `(N, outputs, H / stride, W / stride)`."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Two residual blocks on 14×14 and 7×7 positions, global average pooling, a linear head."""

    def __init__(self, channels: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, 2, 1, bias=False)
        self.norm = nn.GroupNorm(4, channels)
        self.block1 = ResidualBlock(channels, channels, 1)
        self.block2 = ResidualBlock(channels, 2 * channels, 2)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `(N, 1, 28, 28)` to logits."""
        y = F.relu(self.norm(self.stem(x)))
        y = self.block2(self.block1(y))
        return cast(Tensor, self.head(y.mean((2, 3))))


class Layer(nn.Module):
    """A pre-norm Transformer layer."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(N, T, width)` to the same shape."""
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return cast(Tensor, x + self.down(F.gelu(self.up(self.norm2(x)))))


class SmallViT(nn.Module):
    """A vision Transformer on patches of 7×7: 16 tokens and that of the class."""

    def __init__(self, width: int = 48, depth: int = 2, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.layers = nn.Sequential(*(Layer(width, heads, 2 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `(N, 1, 28, 28)` to logits."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat((self.class_token.expand(len(x), -1, -1), y), 1) + self.positions
        return cast(Tensor, self.head(self.norm(self.layers(y)[:, 0])))


class SmallBert(nn.Module):
    """The unmodified `transformers.BertForSequenceClassification` of a small configuration, on numbers of pieces."""

    def __init__(self, vocabulary: int, length: int, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=4,
            intermediate_size=2 * width, max_position_embeddings=length, num_labels=2, pad_token_id=PADDING,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)

    def forward(self, pieces: Tensor) -> Tensor:
        """Sentences `(N, T)` to logits; padding is not attended to."""
        result: Any = self.bert(input_ids=pieces, attention_mask=(pieces != PADDING).long())
        return cast(Tensor, result.logits)


class PairNetwork(nn.Module):
    """Do two images agree? One convolutional encoder for both, then a perceptron on product and squared difference."""

    def __init__(self, channels: int = 8, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, channels, 3, 2, 1), nn.GroupNorm(4, channels), nn.GELU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(4, 2 * channels), nn.GELU(),
            nn.Conv2d(2 * channels, width, 3, 2, 1), nn.GroupNorm(4, width), nn.GELU(),
            nn.Flatten(), nn.Linear(16 * width, width), nn.LayerNorm(width),
        )  # fmt: skip
        self.compare = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, pair: Tensor) -> Tensor:
        """Pairs side by side `(N, 1, 28, 56)` to logits of "different" and "same"."""
        both = self.encoder(torch.cat((pair[..., :28], pair[..., 28:])))
        left, right = both.chunk(2)
        return cast(Tensor, self.compare(torch.cat((left * right, (left - right).square()), -1)))


#: By part, the network for a material's vocabulary and length of sentences (which images do not need).
NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet": lambda vocabulary, length: SmallResNet(),
    "vit": lambda vocabulary, length: SmallViT(),
    "bert": lambda vocabulary, length: SmallBert(vocabulary, length),
    "pairs": lambda vocabulary, length: PairNetwork(),
}
