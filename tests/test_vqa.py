"""Soft accuracy against the definition spelled out person by person."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.selective import coverage_at_risk
from dubito.vqa import answer_matches, normalised_answer, soft_binary_nll, vqa_accuracy


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["cat", "dog", "two"]), min_size=2, max_size=12))
def test_accuracy_is_the_mean_over_whom_one_leaves_out(people: list[str]) -> None:
    count = answer_matches(["cat"], [people])
    others = [people[:i] + people[i + 1 :] for i in range(len(people))]
    expected = sum(min(nine.count("cat") / 3, 1.0) for nine in others) / len(people)
    assert float(vqa_accuracy(count, len(people))) == pytest.approx(expected)


def test_ten_people() -> None:
    found = vqa_accuracy(torch.arange(11))
    expected = torch.tensor([0.0, 0.3, 0.6, 0.9, *itertools.repeat(1.0, 7)], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert vqa_accuracy(torch.zeros(2, 3).long()).shape == (2, 3)


def test_answers_are_compared_without_case_articles_and_marks() -> None:
    assert normalised_answer("  The  red-ish Car. ") == "red ish car"
    assert answer_matches(["A cat", "2"], [["cat", "Cat!", "cats"], ["two", "2", "22"]]).tolist() == [2, 1]


def test_soft_risk_goes_into_selective_prediction() -> None:
    accuracy = vqa_accuracy(torch.tensor([10, 4, 3, 0]))
    coverage = coverage_at_risk(torch.tensor([0.9, 0.8, 0.7, 0.6]), 1 - accuracy, 0.05)
    assert float(coverage) == 75.0  # (0 + 0 + 0.1) / 3 risk


def test_soft_cross_entropy_by_hand() -> None:
    logits, targets = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.3, 1.0]])
    expected = torch.tensor(2.0, dtype=torch.float64)
    expected = torch.log(torch.tensor(2.0)).double() + torch.log1p(torch.exp(-expected))
    torch.testing.assert_close(soft_binary_nll(logits, targets), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="annotators"):
        vqa_accuracy(torch.tensor([1]), 1)
    with pytest.raises(ValueError, match="whole numbers from 0 to annotators=10"):
        vqa_accuracy(torch.tensor([11]))
    with pytest.raises(ValueError, match="one answer a question"):
        answer_matches(["a"], [])
    with pytest.raises(ValueError, match="soft accuracies"):
        soft_binary_nll(torch.zeros(1, 2), torch.full((1, 2), 1.5))
