"""The search for learning rate, weight of the KL and initial spread, by validation NLL alone, equal for all.

`python -m dubito.experiments.singular.sentiment_tuning METHOD` prints a line a setting (methods: deterministic,
mean-field, low-rank). Test sentences and out-of-distribution sources are not looked at.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

from dubito.experiments.singular.contestants import CONTESTANTS, Contest, Recipe
from dubito.experiments.singular.sentiment_exam import Material, SentimentSettings
from dubito.metrics import classification_metrics

RATES, BETAS, SCALES = (1e-3, 3e-3, 1e-2), (1e-3, 1e-2, 1e-1, 1.0), (0.1, 0.03)
EPOCHS, SAMPLES = 5, 8


def search(
    method: str, material: Material, settings: SentimentSettings
) -> Iterator[tuple[Recipe, float, float]]:
    """Recipes with their validation NLL and accuracy: one setting after the other, each at the best of those before."""
    best, least = Recipe(beta=BETAS[0], lr=RATES[0], scale=SCALES[0]), math.inf
    candidates: list[dict[str, Any]] = [
        *({"lr": rate} for rate in RATES),
        *({"beta": beta} for beta in BETAS[1:] if method != "deterministic"),
        *({"scale": scale} for scale in SCALES[1:] if method != "deterministic"),
    ]
    for changed in candidates:
        recipe = dataclasses.replace(best, **changed)
        nll, accuracy = _tried(method, recipe, material, settings)
        yield recipe, nll, accuracy
        if nll < least:
            best, least = recipe, nll


def _tried(
    method: str, recipe: Recipe, material: Material, settings: SentimentSettings
) -> tuple[float, float]:
    settings = dataclasses.replace(
        settings, lr=recipe.lr or settings.lr, recipes={method: recipe}, epochs=EPOCHS, samples=SAMPLES
    )
    problem = material.problem(settings, seed=0)
    fitted = CONTESTANTS[method].train(Contest(problem))
    inputs, labels = problem.validation
    metrics = classification_metrics(fitted.predict(inputs), labels)
    return metrics["nll"], metrics["accuracy"]


def main(methods: list[str]) -> None:
    """Print the search of each method."""
    settings = SentimentSettings()
    material = Material.load(settings)
    for method in methods:
        for recipe, nll, accuracy in search(method, material, settings):
            print(
                f"{method}: lr {recipe.lr:g}, beta {recipe.beta:g}, scale {recipe.scale:g}: validation NLL {nll:.4f}, "
                f"accuracy {accuracy:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or ["deterministic", "mean-field", "low-rank"])
