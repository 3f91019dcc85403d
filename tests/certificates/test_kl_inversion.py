import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Bernoulli, kl_divergence

from dubito.certificates import binary_kl, kl_bound, kl_inverse, sqrt_bound

RISKS = st.floats(0.0, 1.0)
BUDGETS = st.floats(0.0, 20.0)


@pytest.mark.parametrize(
    ("kl", "n", "risk", "root", "inverted"),
    [(5000.0, 60000, 0.02, 0.224, 0.134), (1000.0, 29213, 0.05, 0.181, 0.128)],
)
def test_the_bounds_of_the_reference(kl, n, risk, root, inverted):
    assert sqrt_bound(risk, kl, n, 0.05) == pytest.approx(root, abs=6e-4)
    assert kl_bound(risk, kl, n, 0.05) == pytest.approx(inverted, abs=6e-4)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_binary_kl_is_that_of_two_coins(q, p):
    coins = (Bernoulli(torch.tensor(v, dtype=torch.float64)) for v in (q, p))
    assert binary_kl(q, p) == pytest.approx(float(kl_divergence(*coins)), rel=1e-9, abs=1e-13)


def test_binary_kl_at_the_ends():
    assert binary_kl(0.0, 0.25) == pytest.approx(-math.log(0.75))
    assert binary_kl(1.0, 0.25) == pytest.approx(math.log(4.0))
    assert binary_kl(0.5, 0.0) == math.inf
    assert binary_kl(0.0, 0.0) == 0.0


@settings(deadline=None, max_examples=100)
@given(RISKS, BUDGETS)
def test_the_inverse_inverts_and_is_rounded_up(q, c):
    p = kl_inverse(q, c)
    assert q <= p <= 1.0
    assert binary_kl(q, p) >= c * (1 - 1e-6) or p == 1.0
    below = p - 1e-9
    if below > q:
        assert binary_kl(q, below) <= c + 1e-15


def test_the_inverse_of_no_errors_is_known():
    assert kl_inverse(0.0, 0.3) == pytest.approx(1 - math.exp(-0.3), rel=1e-12)  # kl(0 ‖ p) = -ln(1 - p)
    assert kl_inverse(0.3, 0.0) == pytest.approx(0.3, abs=1e-7)
    assert kl_inverse(0.3, math.inf) == 1.0
    assert kl_inverse(1.0, 0.0) == 1.0


@settings(deadline=None, max_examples=200)
@given(RISKS, st.floats(0.0, 1e6), st.integers(8, 10**6), st.floats(1e-4, 0.5))
def test_the_inverted_form_is_never_above_the_square_root(risk, kl, n, delta):
    assert risk <= kl_bound(risk, kl, n, delta) <= sqrt_bound(risk, kl, n, delta)


@settings(deadline=None, max_examples=50)
@given(RISKS, st.floats(0.0, 1e4), st.integers(8, 10**5))
def test_bounds_grow_with_kl_and_shrink_with_delta(risk, kl, n):
    assert kl_bound(risk, kl + 1.0, n) >= kl_bound(risk, kl, n)
    assert kl_bound(risk, kl, n, 0.2) <= kl_bound(risk, kl, n, 0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((1.2, 1.0, 100), "must lie in"),
        ((math.nan, 1.0, 100), "must lie in"),
        ((0.1, -1.0, 100), "at least 0"),
        ((0.1, math.nan, 100), "finite"),
        ((0.1, 1.0, 7), "at least 8"),
        ((0.1, 1.0, 100, 1.0), "strictly between"),
    ],
)
def test_bad_numbers_are_refused(arguments, says):
    for bound in (kl_bound, sqrt_bound):
        with pytest.raises(ValueError, match=says):
            bound(*arguments)
    with pytest.raises(ValueError, match="at least 0"):
        kl_inverse(0.1, -0.1)
