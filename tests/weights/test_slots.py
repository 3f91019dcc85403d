"""Slots: every place of a parameter, ties by identity, what stands there during a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito.swap import Swap
from dubito.weights.slots import find_slots, recurrent_owners


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3))
        self.again = self.inner
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.register_parameter("absent", None)
        self.own = nn.Parameter(torch.ones(()), requires_grad=False)


def test_ties_are_found_by_identity_in_the_order_of_named_parameters() -> None:
    module = Tied()
    slots = find_slots(module)
    assert [s.name for s in slots] == [n for n, _ in module.named_parameters()]
    by_name = {s.name: s for s in slots}
    tied = by_name["embedding.weight"]
    assert tied.aliases == ("embedding.weight", "output.weight")
    assert tied.tied
    assert tied.places == [(module.embedding, "weight"), (module.output, "weight")]
    assert not by_name["inner.0.weight"].tied, "a module met twice is one place"
    assert by_name["own"].shape == ()
    assert not by_name["own"].requires_grad


def test_put_reaches_all_places_and_none_empties_them() -> None:
    module = Tied()
    (slot,) = [s for s in find_slots(module) if s.tied]
    slot.put(None)
    assert module.embedding.weight is None
    assert module.output.weight is None
    assert not slot.occupied
    with pytest.raises(RuntimeError, match=r"'embedding\.weight' is held as factors.*bayes\.merge\(\)"):
        _ = slot.parameter
    again = nn.Parameter(torch.ones(5, 3))
    slot.put(again)
    assert slot.parameter is module.output.weight is again


def test_the_parameter_is_known_while_a_draw_stands_in_its_place() -> None:
    module = Tied()
    slots = find_slots(module)
    own = slots[1].parameter
    draw, inner = torch.zeros_like(own), torch.ones_like(own)
    with Swap([(slots[1], draw)], []):
        assert slots[1].owner._parameters[slots[1].attribute] is draw
        assert slots[1].parameter is own
        with Swap([(slots[1], inner)], []):
            assert slots[1].owner._parameters[slots[1].attribute] is inner
            assert slots[1].parameter is own
        assert slots[1].owner._parameters[slots[1].attribute] is draw
    assert slots[1].owner._parameters[slots[1].attribute] is own
    assert slots[1].held is None


def test_recurrent_modules_see_what_stands_in_their_slots() -> None:
    module = nn.Sequential(nn.LSTM(2, 3, num_layers=2), nn.Linear(3, 1))
    slots = find_slots(module)
    assert recurrent_owners(slots) == [module[0]]
    draw = torch.zeros(12, 2)
    with Swap([(slots[0], draw)], recurrent_owners(slots)):
        assert module[0]._flat_weights[0] is draw
    assert module[0]._flat_weights[0] is module[0].weight_ih_l0
    new = nn.Parameter(torch.ones(12, 2))
    slots[0].put(new)
    assert module[0]._flat_weights[0] is new
