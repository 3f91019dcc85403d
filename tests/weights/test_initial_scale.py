"""One policy for initial scales: what the fan-in of every kind of parameter is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito.weights.initial_scale import centre, fan_in, spread_of
from dubito.weights.slots import find_slots


def fans(module: nn.Module) -> dict[str, float]:
    return {slot.name: fan_in(slot) for slot in find_slots(module)}


CASES: dict[str, tuple[nn.Module, dict[str, float]]] = {
    "linear": (nn.Linear(7, 3), {"weight": 7, "bias": 7}),
    "conv1d groups": (nn.Conv1d(4, 6, 5, groups=2), {"weight": 10, "bias": 10}),
    "conv2d": (nn.Conv2d(3, 8, (3, 2)), {"weight": 18, "bias": 18}),
    "conv3d": (nn.Conv3d(2, 4, (1, 2, 3)), {"weight": 12, "bias": 12}),
    "one output channel": (nn.Conv2d(64, 1, 3), {"weight": 576, "bias": 576}),
    "bilinear with one output": (nn.Bilinear(5, 7, 1), {"weight": 35, "bias": 35}),
    "one output": (nn.Linear(7, 1), {"weight": 7, "bias": 7}),
    "transposed": (nn.ConvTranspose2d(4, 6, 3), {"weight": 36, "bias": 36}),
    "transposed groups": (nn.ConvTranspose1d(4, 6, 3, groups=2), {"weight": 6, "bias": 6}),
    "embedding": (nn.Embedding(100, 16), {"weight": 16}),
    "layer norm": (nn.LayerNorm(5), {"weight": 1, "bias": 1}),
    "batch norm": (nn.BatchNorm1d(5), {"weight": 1, "bias": 1}),
    "lstm": (
        nn.LSTM(3, 4, proj_size=2),
        {"weight_ih_l0": 3, "weight_hh_l0": 2, "bias_ih_l0": 3, "bias_hh_l0": 2, "weight_hr_l0": 4},
    ),
    "attention": (
        nn.MultiheadAttention(6, 2),
        {"in_proj_weight": 6, "in_proj_bias": 6, "out_proj.weight": 6, "out_proj.bias": 6},
    ),
    "attention of other sizes": (
        nn.MultiheadAttention(6, 2, kdim=4, vdim=3, bias=False),
        {"q_proj_weight": 6, "k_proj_weight": 4, "v_proj_weight": 3, "out_proj.weight": 6},
    ),
    "biases of attention of other sizes": (
        nn.MultiheadAttention(6, 2, kdim=4, vdim=3, add_bias_kv=True),
        {
            "q_proj_weight": 6,
            "k_proj_weight": 4,
            "v_proj_weight": 3,
            "in_proj_bias": 6,
            "bias_k": 6,
            "bias_v": 6,
            "out_proj.weight": 6,
            "out_proj.bias": 6,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fan_in(name: str) -> None:
    module, expected = CASES[name]
    assert fans(module) == expected


def test_fan_in_of_layers_stored_in_out() -> None:
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(12, 5)  # 5 inputs, stored (5, 12)
    assert fans(layer) == {"weight": 5, "bias": 5}


def test_fan_in_survives_a_weight_that_has_left_storage() -> None:
    module = nn.Linear(7, 3)
    slots = {s.name: s for s in find_slots(module)}
    slots["weight"].put(None)
    assert fan_in(slots["weight"]) == 7


def test_normalisation_gains_are_centred_on_one() -> None:
    centres = {s.name: centre(s) for s in find_slots(nn.LayerNorm(4))}
    assert centres == {"weight": 1.0, "bias": 0.0}
    assert {centre(s) for s in find_slots(nn.Linear(3, 2))} == {0.0}


def test_spread_of() -> None:
    value = torch.tensor([1.0, 3.0])
    assert spread_of(value, 9.0) == pytest.approx(1.0)
    assert spread_of(torch.ones(5), 16.0) == pytest.approx(0.25)
    assert spread_of(torch.tensor([2.0]), 4.0) == pytest.approx(0.5)
    assert spread_of(torch.tensor([1.0, 3.0]).bfloat16(), 9.0) == pytest.approx(1.0)
