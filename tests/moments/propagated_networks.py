"""Small networks, none written for propagation, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Any]
BATCH = 3


class Block(nn.Module):
    """A residual block as people write it: in-place ReLU, and `+=`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.blocks, self.head = nn.Sequential(Block(8), Block(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.pool(self.blocks(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        hidden = self.encoder(self.table(tokens), src_key_padding_mask=padding)
        return self.head(hidden.masked_fill(padding.unsqueeze(-1), 0.0).mean(1))


class Attention(nn.Module):
    """`nn.MultiheadAttention`, with the weights it is asked for (composed, not fused)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=True)[0][:, 0])


def padded_tokens() -> Tensor:
    tokens = torch.randint(1, 20, (BATCH, 6))
    tokens[0, 4:] = 0
    return tokens


def text() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": torch.randint(0, 50, (BATCH, 7)), "attention_mask": mask}


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def vit(attention: str) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5, attn_implementation=attention)
    return ViTForImageClassification(config), torch.randn(BATCH, 3, 16, 16)


def bert(attention: str) -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SIZES, vocab_size=50, num_labels=3, attn_implementation=attention)
    return BertForSequenceClassification(config), text()


def gpt2(attention: str) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 50}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation=attention)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 50, (BATCH, 7))}


def llama(attention: str) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, vocab_size=50, num_key_value_heads=2, attn_implementation=attention)
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 50, (BATCH, 7))}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4
    )
    return ResNetForImageClassification(config), torch.randn(BATCH, 3, 32, 32)


def vilt() -> Made:
    from transformers import ViltConfig, ViltForQuestionAnswering

    config = ViltConfig(**SIZES, vocab_size=50, image_size=16, patch_size=4, num_labels=4)
    images = {
        "pixel_values": torch.randn(BATCH, 3, 16, 16),
        "pixel_mask": torch.ones(BATCH, 16, 16, dtype=torch.long),
    }
    return ViltForQuestionAnswering(config), {**text(), **images}


NETWORKS: dict[str, Callable[[], Made]] = {
    "resnet_by_hand": lambda: (ResNet(), torch.randn(BATCH, 3, 8, 8)),
    "encoder_with_padding": lambda: (Encoder(), padded_tokens()),
    "multihead_attention": lambda: (Attention(), torch.randn(BATCH, 5, 16)),
    "vit": lambda: vit("sdpa"),
    "vit_eager": lambda: vit("eager"),
    "bert": lambda: bert("sdpa"),
    "bert_eager": lambda: bert("eager"),
    "gpt2": lambda: gpt2("sdpa"),
    "gpt2_eager": lambda: gpt2("eager"),
    "llama": lambda: llama("sdpa"),
    "llama_eager": lambda: llama("eager"),
    "resnet": resnet,
    "vilt": vilt,
}
