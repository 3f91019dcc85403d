"""The two PAC-Bayes inequalities as numbers, and the inversion of the binary relative entropy.

For a loss in [0, 1], a prior P fixed before N independent data, with probability 1 - δ for all Q at once
(McAllester 1999, Seeger 2002, with Maurer's 2004 constant, which holds for N ≥ 8):

    kl(L̂(Q) ‖ L(Q)) ≤ (KL(Q‖P) + ln(2 √N / δ)) / N,

from which Pinsker's inequality makes L(Q) ≤ L̂(Q) + sqrt((KL(Q‖P) + ln(2 √N / δ)) / (2 N)).
"""

from __future__ import annotations

import math

from dubito.argument_checks import check_fraction
from dubito.scalar_checks import count, non_negative

__all__ = ["binary_kl", "kl_bound", "kl_inverse", "pac_bayes_term", "sqrt_bound"]

_STEPS = 200  # halvings: beyond the last digit of a float


def binary_kl(q: float, p: float) -> float:
    """kl(q ‖ p) in nats: the relative entropy of two coins, q and p in [0, 1]."""
    q, p = _risk("q", q), _risk("p", p)
    total = 0.0
    for a, b in ((q, p), (1.0 - q, 1.0 - p)):
        if a > 0:
            total += math.inf if b == 0 else a * math.log(a / b)
    return max(total, 0.0)


def kl_inverse(q: float, c: float) -> float:
    """The largest p ≥ q with kl(q ‖ p) ≤ c, by bisection; rounded up.

    Args:
        q: an empirical risk in [0, 1].
        c: a budget in nats, ≥ 0; may be infinite.

    Raises:
        ValueError: q outside [0, 1], c negative, or NaN.
    """
    q = _risk("q", q)
    if math.isnan(c) or c < 0:
        raise ValueError(f"c={c} must be at least 0 (nats)")
    low, high = q, 1.0
    if binary_kl(q, 1.0) <= c:
        return 1.0
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if binary_kl(q, middle) <= c:
            low = middle
        else:
            high = middle
    return high


def pac_bayes_term(kl: float, n: int, delta: float) -> float:
    """(KL + ln(2 √N / δ)) / N, the budget of both inequalities.

    Args:
        kl: KL(Q‖P) in nats, not from sampling.
        n: number of independent data N ≥ 8.
        delta: δ in (0, 1).

    Raises:
        ValueError: fewer than 8 data, a KL that is negative or NaN, or δ outside (0, 1).
    """
    check_fraction("delta", delta)
    number = count("n", n, "independent data; Maurer's constant needs 8", 8)
    if kl == math.inf:
        return math.inf
    return (non_negative("kl", kl) + math.log(2.0 * math.sqrt(number) / delta)) / number


def sqrt_bound(empirical: float, kl: float, n: int, delta: float = 0.05) -> float:
    """The square-root form: L̂ + sqrt((KL + ln(2 √N / δ)) / (2 N)). It may exceed 1. Arguments as for `kl_bound`."""
    return _risk("empirical", empirical) + math.sqrt(0.5 * pac_bayes_term(kl, n, delta))


def kl_bound(empirical: float, kl: float, n: int, delta: float = 0.05) -> float:
    """The inverted-kl form, never above the square-root form.

    Args:
        empirical: L̂(Q), the Gibbs predictor's mean loss on the N data, in [0, 1].
        kl: KL(Q‖P) in nats.
        n: N ≥ 8.
        delta: δ in (0, 1).

    Raises:
        ValueError: arguments out of range, or NaN.
    """
    inverted = kl_inverse(empirical, pac_bayes_term(kl, n, delta))
    return min(inverted, sqrt_bound(empirical, kl, n, delta))


def _risk(name: str, value: float) -> float:
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}={value} must lie in [0, 1]: it is a mean of losses that do")
    return number
