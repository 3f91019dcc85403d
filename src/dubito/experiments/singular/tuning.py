"""How the recipes were chosen: the same grid for every method with random weights, by validation NLL alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from dubito.experiments.singular.contestants import CONTESTANTS, Contest, Examples, Fitted, Problem, Recipe

#: beta (of the ELBO), initial scale: one grid for all.
GRID: tuple[Recipe, ...] = tuple(
    Recipe(beta=beta, scale=scale) for beta, scale in itertools.product((0.1, 0.3, 1.0), (0.03, 0.1, 0.3))
)
TUNED = ("mean-field", "low-rank", "low-rank-svd", "rank-one")


def validation_nll(fitted: Fitted, validation: Examples) -> float:
    """Mean −log predictive probability (density) of the validation targets, in nats."""
    inputs, targets = validation
    return -float(fitted.predict(inputs).log_prob(targets.cpu()).double().mean())


def search(
    problem: Problem,
    methods: Sequence[str] = TUNED,
    grid: Sequence[Recipe] = GRID,
    say: Callable[[str], None] = lambda text: None,
) -> Mapping[str, Recipe]:
    """The recipe of least validation NLL for each method; nothing but `problem` is looked at."""
    first = Contest(problem)
    best: dict[str, Recipe] = {}
    for method in methods:
        scores: dict[float, Recipe] = {}
        for recipe in grid:
            contest = Contest(dataclasses.replace(problem, recipes={method: recipe}))
            contest.__dict__["plain"] = first.plain  # trained once for all
            score = validation_nll(CONTESTANTS[method].train(contest), problem.validation)
            scores.setdefault(score, recipe)
            say(f"{method}: beta {recipe.beta:g}, scale {recipe.scale:g}: validation NLL {score:.4f}")
        best[method] = scores[min(scores)]
    return best
