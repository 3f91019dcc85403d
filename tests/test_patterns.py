"""Patterns: names, globs, modules, classes, the rest; and what is wrong said with the nearest names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dubito
from dubito import LowRankCovariance, LowRankFactors, MeanField, Point
from dubito.patterns import assign
from dubito.weights.slots import find_slots


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.encoder2 = nn.Linear(4, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight


def assigned(families: Any) -> dict[str, Any]:
    module = Net()
    return {s.name: family for family, slots in assign(module, find_slots(module), families) for s in slots}


ALL = set(assigned(MeanField()))
A, B, C = MeanField(), MeanField(scale=0.2), Point()


def test_one_family_for_all() -> None:
    assert assigned(A) == dict.fromkeys(ALL, A)
    assert "output.weight" not in ALL, "a tied parameter once, under its first name"


def test_the_kinds_of_patterns() -> None:
    found = assigned({"encoder": A, "*r2.bias": B, nn.Embedding: C})
    assert {n for n, f in found.items() if f is A} == {
        f"encoder.{i}.{k}" for i in (0, 1, 2) for k in ("weight", "bias")
    }
    assert {n for n, f in found.items() if f is B} == {"encoder2.bias"}
    assert {n for n, f in found.items() if f is C} == {"embedding.weight"}
    assert assigned({"encoder.0.weight": A}) == {"encoder.0.weight": A}
    assert set(assigned({"encoder.?.weight": A})) == {f"encoder.{i}.weight" for i in (0, 1, 2)}
    assert set(assigned({"encoder.[02]*": A})) == {
        f"encoder.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")
    }


def test_the_rest_is_what_nothing_else_names_wherever_it_stands() -> None:
    found = assigned({"rest": A, nn.LayerNorm: C})
    assert {n for n, f in found.items() if f is C} == {"encoder.1.weight", "encoder.1.bias"}
    assert set(found) == ALL
    assert assigned({"*": A, "rest": B}) == dict.fromkeys(ALL, A), "nothing may be left for it"


def test_a_tied_parameter_answers_to_all_its_names() -> None:
    assert set(assigned({"output.weight": A})) == {"embedding.weight"}
    assert set(assigned({"output": A})) == {"embedding.weight"}
    with pytest.raises(
        ValueError, match=r"'embedding\.weight' is matched by two patterns, 'embedding' and 'output'"
    ):
        assigned({"embedding": A, "output": B})


def unchanged(call: Callable[[nn.Module], Any], error: type[Exception], match: str) -> None:
    module = Net()
    before = [(n, id(p), p.clone()) for n, p in module.named_parameters(remove_duplicate=False)]
    with pytest.raises(error, match=match):
        call(module)
    after = list(module.named_parameters(remove_duplicate=False))
    assert [(n, i) for n, i, _ in before] == [(n, id(p)) for n, p in after]
    assert all(torch.equal(value, p) for (_, _, value), (_, p) in zip(before, after, strict=True))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown name": ({"encodr.0": A}, ValueError, r"'encodr\.0' matches no parameter; nearest names: .*'encoder\.0"),
    "unknown glob": ({"*.wieght": A}, ValueError, r"'\*\.wieght' matches no parameter; nearest names: '"),
    "unknown class": ({nn.Conv2d: A}, ValueError, r"no module of class Conv2d.*Embedding.*LayerNorm, Linear"),
    "twice": ({"encoder": A, "*.bias": B}, ValueError, r"matched by two patterns, 'encoder' and '\*\.bias'.*\"rest\""),
    "twice by class": ({nn.Linear: A, "encoder2": B}, ValueError, r"two patterns, Linear and 'encoder2'"),
    "empty": ({}, ValueError, "families is empty"),
    "no family": (3, TypeError, r"families must be a family such as dubito\.MeanField\(\) or a mapping"),
    "class for family": (MeanField, TypeError, r"families .*MeanField\("),
    "class in mapping": ({"encoder": MeanField}, TypeError, r"families\['encoder'\].*write MeanField\(\)"),
    "bad pattern": ({3: A}, TypeError, "the pattern 3 must be a string or a module class"),
    "bad class": ({int: A}, TypeError, "must be a string or a module class"),
    "late": ({"encoder": LowRankFactors(2, init="svd"), "encodr2": A}, ValueError, "matches no parameter"),
    "late rank": (
        {"encoder.0": LowRankFactors(2, init="svd"), "encoder2": LowRankCovariance(21)}, ValueError, "rank=21 is above"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_patterns_say_so_and_change_nothing(name: str) -> None:
    families, error, match = BAD[name]
    unchanged(lambda module: dubito.bayesianize(module, families), error, match)


def test_an_empty_glob_class_is_no_accident() -> None:
    unchanged(lambda m: dubito.bayesianize(m, {"": A}), ValueError, "matches no parameter")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(sorted(ALL)), unique=True, min_size=1))
def test_names_and_the_rest_partition_the_parameters(names: list[str]) -> None:
    found = assigned({**dict.fromkeys(names, A), "rest": B})
    assert set(found) == ALL
    assert {n for n, f in found.items() if f is A} == set(names)
