"""Accuracy of answers to questions about images, where ten people answered each question and need not agree.

An answer's accuracy is soft: `min(matches / 3, 1)` over nine of the ten people, averaged over whom one leaves out
(Antol et al., 2015, "VQA: Visual Question Answering"). One less it is the risk of selective prediction (Whitehead et
al., 2022, "Reliable visual question answering"):

    accuracy = vqa_accuracy(answer_matches(predicted, annotated), annotators=10)
    coverage_at_risk(confidence, 1 - accuracy, 0.01)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.argument_checks import check_same_shape, check_values, to_double

ENOUGH = 3  # people who agree with an answer make it right
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MARKS = re.compile(r"[^\w\s']|_")
_SPACES = re.compile(r"\s+")


def normalised_answer(text: str) -> str:
    """An answer without case, articles, punctuation and doubled spaces.

    The official evaluation also writes numbers as digits and mends contractions; who compares with its tables should
    normalise by it first.
    """
    plain = _ARTICLES.sub(" ", _MARKS.sub(" ", text.lower()))
    return _SPACES.sub(" ", plain).strip()


def answer_matches(predicted: Sequence[str], annotated: Sequence[Sequence[str]]) -> Tensor:
    """How many people gave the predicted answer, int64 `(N,)`; compared by `normalised_answer`.

    Args:
        predicted: one answer a question.
        annotated: by question, what each person answered.

    Raises:
        ValueError: for lists of different lengths.
    """
    if len(predicted) != len(annotated):
        raise ValueError(
            f"`predicted` has {len(predicted)} answers, `annotated` {len(annotated)} questions: one answer a question"
        )
    counts = [
        sum(normalised_answer(one) == normalised_answer(answer) for one in people)
        for answer, people in zip(predicted, annotated, strict=True)
    ]
    return torch.tensor(counts, dtype=torch.long)


def vqa_accuracy(matches: Tensor, annotators: int = 10) -> Tensor:
    """Soft accuracy in [0, 1] of answers by how many people gave them, float64 of the same shape.

    The mean over whom one leaves out of `min(matches among the others / 3, 1)`: 0, .3, .6, .9, 1 for 0 to 4 of ten.
    For a classifier over a list of answers, the counts of every answer `(N, C)` give its soft targets.

    Args:
        matches: any shape, whole numbers from 0 to `annotators`.
        annotators: people who answered each question, at least 2.

    Raises:
        ValueError: for too few people, or counts that are none.
    """
    if isinstance(annotators, bool) or not isinstance(annotators, int) or annotators < 2:
        raise ValueError(
            f"`annotators` must be a whole number of at least 2 (one of them is left out), got {annotators!r}"
        )
    m = check_values("matches", matches)
    if not bool(((m >= 0) & (m <= annotators) & (m == m.round())).all()):
        raise ValueError(f"`matches` must be whole numbers from 0 to annotators={annotators}")
    without_a_match = ((m - 1) / ENOUGH).clamp(0, 1)
    without_another = (m / ENOUGH).clamp(0, 1)
    return (m * without_a_match + (annotators - m) * without_another) / annotators


def soft_binary_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy of soft targets, summed over answers and averaged over questions, in nats.

    Args:
        logits: `(N, C)`, one a candidate answer.
        targets: `(N, C)` soft accuracies in [0, 1].

    Raises:
        ValueError: for shapes that differ, NaN, or targets outside [0, 1].
    """
    values = check_values("targets", targets)
    check_same_shape(logits=logits, targets=targets)
    check_values("logits", logits)
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise ValueError("`targets` must lie in [0, 1]: soft accuracies, as `vqa_accuracy` gives them")
    each = F.binary_cross_entropy_with_logits(
        to_double(logits), values.reshape(targets.shape), reduction="none"
    )
    return each.sum(-1).mean()
