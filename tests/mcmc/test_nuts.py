"""NUTS through Pyro: a conjugate posterior, the module and the random state left alone, and a clear missing extra."""

import copy
import importlib.util
import sys
import warnings

import pytest
import torch
from conjugate import NOISE, assert_within_monte_carlo_error, everything_of, exact, regression
from torch.distributions import Distribution, Normal

import dubito
from dubito.mcmc import MissingPyroError, nuts

needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("pyro") is None, reason='pyro-ppl is not installed (the extra "mcmc")'
)


@needs_extra
def test_a_conjugate_posterior_is_recovered() -> None:
    net, x, y = regression()
    before, validating = everything_of(net), Distribution._validate_args
    state = torch.get_rng_state()
    result = nuts(
        net, Normal(0.0, 1.0), x, y, dubito.Gaussian(NOISE), samples=400, warmup=100, chains=2,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    assert everything_of(net) == before
    assert Distribution._validate_args == validating
    assert_within_monte_carlo_error(result, *exact(x, y))
    assert float(result.convergence.r_hat) < 1.01
    assert max(float(c.r_hat.max()) for c in result.weight_convergence().values()) < 1.01
    assert int(result.divergences.sum()) == 0
    assert bool(((result.acceptance > 0.6) & (result.acceptance <= 1)).all())
    assert bool((result.step_size > 0).all())
    assert result.gradient_evaluations > 2 * 500
    copied = copy.deepcopy(result.bayesian())
    torch.testing.assert_close(copied.predict(x, samples=800).mean, result.predict(x).mean)


@needs_extra
def test_chains_are_repeatable_by_the_global_seed_and_differ() -> None:
    net, x, y = regression()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dubito.DubitoWarning)  # five draws may not have mixed
            result = nuts(
                net, "fan_in", x, y, dubito.Gaussian(), samples=5, warmup=5, chains=2, max_tree_depth=3
            )
        found.append(result.draws["weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][0], found[0][1])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = regression()
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyro"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyro", None)
    with pytest.raises(MissingPyroError, match=r"dubito\[mcmc\].*hmc needs no extra"):
        nuts(net, "fan_in", x, y, dubito.Gaussian(), samples=5, warmup=5)


def test_options_of_the_other_sampler_are_refused() -> None:
    net, x, y = regression()
    with pytest.raises(TypeError, match=r"nuts\(\) has no argument 'leapfrog_steps'"):
        nuts(net, "fan_in", x, y, dubito.Gaussian(), leapfrog_steps=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="max_tree_depth must be at least 1"):
        nuts(net, "fan_in", x, y, dubito.Gaussian(), max_tree_depth=0)
