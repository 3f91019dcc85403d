from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from dubito.training import FitConfig
from dubito.training.config import FitOptions, check_names


def test_every_field_is_an_option_of_the_same_type() -> None:
    hints = get_type_hints(FitConfig)
    assert get_type_hints(FitOptions) == {field.name: hints[field.name] for field in fields(FitConfig)}


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": 2.5}, TypeError, "epochs must be a whole number"),
        ({"samples": 0}, ValueError, "samples must be at least 1"),
        ({"samples": True}, TypeError, "samples"),
        ({"validation_samples": -1}, ValueError, "validation_samples must be at least 0"),
        ({"n_data": 0}, ValueError, "n_data"),
        ({"lr": 0.0}, ValueError, "lr must be finite and above 0"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"lr": "fast"}, TypeError, "lr must be a number"),
        ({"beta": -1.0}, ValueError, "beta must be finite and at least 0"),
        ({"objective": "vi"}, ValueError, "objective must be one of 'elbo', 'expected_loss'; got 'vi'"),
        ({"precision": "fp8"}, ValueError, "precision"),
        ({"scheduler": 3}, TypeError, "scheduler must be a function"),
        ({"resume": True}, ValueError, "checkpoint_dir"),
        ({"checkpoint_every": 3}, ValueError, "checkpoint_dir"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        FitConfig(**options)


def test_an_unknown_option_brings_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"no argument 'sample'; did you mean samples"):
        check_names({"sample": 3})  # type: ignore[typeddict-unknown-key]
