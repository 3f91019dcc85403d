"""The conformance battery: every family on every kind of module (`conformance.py`)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from conformance import FAMILIES, KINDS, bayesian, plain
from dubito.monte_carlo import Draws
from dubito.weights import WeightPosterior

pytestmark = [
    pytest.mark.parametrize("family", FAMILIES),
    pytest.mark.parametrize("kind", KINDS),
]

RANDOM = [name for name, family in FAMILIES.items() if not isinstance(family, dubito.Point)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def tensor_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def is_random(bayes: dubito.BayesianModule) -> bool:
    return len(bayes.posterior) > 0


def seeded_prediction(bayes: dubito.BayesianModule, x: Tensor) -> Tensor:
    return bayes.predict(x, samples=2, generator=torch.Generator().manual_seed(3)).mean


def state_of(bayes: dubito.BayesianModule) -> list[tuple[int, ...]]:
    """What stands where, by identity, and the values' versions."""
    state = [(id(m), id(p)) for m in bayes.modules() for p in m._parameters.values()]
    for module in bayes.modules():
        if isinstance(module, nn.RNNBase):
            state.append(tuple(map(id, module._flat_weights)))
    state.append(tuple(p._version for p in bayes.parameters()))
    state.append(tuple(int(m.training) for m in bayes.modules()))
    state.append(tuple(int(slot.held is None) for slot in bayes._slots.values()))
    return state


def stacked_draws(bayes: dubito.BayesianModule, count: int) -> dict[str, Tensor]:
    """Dense draws of every random parameter, `(count, *shape)`, in one pass."""
    result: dict[str, Tensor] = {}
    for posterior in bayes.posteriors():

        def one(_: Tensor, p: WeightPosterior = posterior) -> dict[str, Tensor]:
            return p.dense(p.realize(p.components(p.noise())))

        result.update(torch.vmap(one, randomness="different")(torch.arange(count)))
    return result


# ---------------------------------------------------------------------------------------------- the mean module


def test_no_spread_reproduces_the_mean_module(family: str, kind: str) -> None:
    bayes, x = bayesian(family, kind, dtype=torch.float64), KINDS[kind].input(dtype=torch.float64)
    bayes.rescale_spread_(0.0)
    mean = bayes.merge()
    assert type(mean) is type(plain(kind))
    assert [n for n, _ in mean.named_parameters()] == [n for n, _ in plain(kind).named_parameters()]
    expected = tensor_of(mean(x))
    if not any(p.takes_over for p in bayes.posteriors()):
        original = plain(kind, dtype=torch.float64).eval()
        assert torch.equal(expected, tensor_of(original(x)))
        assert all(torch.equal(a, b) for a, b in zip(mean.parameters(), original.parameters(), strict=True))
    for name, output in {
        "a draw": tensor_of(bayes(x)),
        "several draws": bayes.outputs(x, samples=2),
        "sample": tensor_of(bayes.sample()(x)),
        "predict": bayes.predict(x, samples=2).mean,
        "eval": tensor_of(bayes.eval()(x)),
    }.items():
        deviation = (output - expected).abs().max()
        assert deviation < 1e-6, f"{name} deviates by {float(deviation):.2g}"


def test_eval_is_deterministic_and_runs_at_the_mean(family: str, kind: str) -> None:
    bayes, x = bayesian(family, kind).eval(), KINDS[kind].input()
    first = tensor_of(bayes(x))
    assert torch.equal(first, tensor_of(bayes(x)))
    torch.testing.assert_close(first, tensor_of(bayes.merge()(x)), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ gradient


def scalar(output: Any) -> Tensor:
    """A curved function that no normalisation makes constant."""
    y = tensor_of(output)
    weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y * weights + 0.3 * y.square()).sin().sum()


def test_gradient_reaches_every_parameter_exactly_once(family: str, kind: str) -> None:
    """The derivative along a random direction in all parameters together, against central differences."""
    bayes, x = bayesian(family, kind, dtype=torch.float64), KINDS[kind].input(dtype=torch.float64)
    if KINDS[kind].tokens is not None:
        x = x.clamp_min(1)  # 0 is the padding token, which is to get no gradient
    parameters = [p for p in bayes.parameters() if p.requires_grad]
    draws = bayes.draw(2)

    def training() -> Tensor:
        torch.manual_seed(2)
        return scalar(bayes(x))

    def common() -> Tensor:
        return scalar(bayes.outputs(x, draws=draws))

    for loss in (training, common):
        bayes.zero_grad()
        loss().backward()
        missing = [n for n, p in bayes.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert missing == []
        directions = [torch.randn_like(p) for p in parameters]
        predicted = sum(float((p.grad * d).sum()) for p, d in zip(parameters, directions, strict=True))
        values = []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                for p, d in zip(parameters, directions, strict=True):
                    p.add_(d, alpha=step)
                values.append(float(loss()))
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=1e-6)
        measured = (values[0] - values[1]) / 2e-6
        assert measured == pytest.approx(predicted, rel=2e-4, abs=1e-6), loss.__name__


def test_every_trainable_tensor_is_held_once(family: str, kind: str) -> None:
    bayes = bayesian(family, kind)
    listed = [id(p) for p in bayes.parameters()]
    assert len(listed) == len(set(listed))
    owned = {id(p) for m in bayes.modules() for p in m._parameters.values() if p is not None}
    assert owned == set(listed)
    for posterior in bayes.posteriors():
        assert {id(p) for p in posterior.parameters()} <= owned
        assert posterior.takes_over == any(not s.occupied for s in posterior.slots)
    groups = dubito.parameter_groups(bayes, lr=0.1, weight_decay=0.01)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in bayes.parameters() if p.requires_grad)
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    assert not decayed & {id(p) for q in bayes.posteriors() for p in q.spread_parameters()}


# ---------------------------------------------------------------------------------------------------------- copies


def test_copies_predict_the_same(family: str, kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    bayes, x = bayesian(family, kind), KINDS[kind].input()
    scalar(bayes(x)).backward()  # a graph and gradients are about
    with torch.no_grad():
        for p in bayes.parameters():
            p.add_(0.05 * torch.randn_like(p))
    expected = seeded_prediction(bayes, x)
    loaded = bayesian(family, kind, seed=7)
    assert not torch.equal(seeded_prediction(loaded, x), expected)
    loaded.load_state_dict(bayes.state_dict())
    save_model(bayes, str(tmp_path / "weights.safetensors"))
    restored = bayesian(family, kind, seed=8)
    load_model(restored, str(tmp_path / "weights.safetensors"))
    copies = {
        "deepcopy": copy.deepcopy(bayes),
        "pickle": pickle.loads(pickle.dumps(bayes)),
        "state_dict": loaded,
        "safetensors": restored,
    }
    for name, other in copies.items():
        assert torch.equal(seeded_prediction(other, x), expected), name
        assert not {id(p) for p in other.parameters()} & {id(p) for p in bayes.parameters()}, name
        scalar(other(x)).backward()  # alive: trains on its own


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_conversion_of_dtype(family: str, kind: str, dtype: torch.dtype) -> None:
    single, bayes = bayesian(family, kind), bayesian(family, kind).to(dtype)
    x = KINDS[kind].input()
    converted = x.to(dtype) if x.is_floating_point() else x
    assert {p.dtype for p in bayes.parameters()} == {dtype}
    draw = tensor_of(bayes(converted))
    assert draw.dtype == dtype
    assert draw.isfinite().all()
    assert bayes.outputs(converted, samples=2).dtype == dtype
    assert bayes.predict(converted, samples=2).mean.isfinite().all()
    expected, output = tensor_of(single.eval()(x)), tensor_of(bayes.eval()(converted))
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float64 else 0.06
    assert (output.double() - expected.double()).abs().max() <= tolerance * expected.abs().max().clamp_min(
        1.0
    )
    for posterior in bayes.posteriors():
        assert {v.dtype for v in posterior.draw((2,)).values()} == {dtype}


# ----------------------------------------------------------------------------------------------------------- draws


def test_two_draws_differ(family: str, kind: str) -> None:
    bayes, x = bayesian(family, kind), KINDS[kind].input()
    one, other = tensor_of(bayes(x)), tensor_of(bayes(x))
    assert torch.equal(one, other) != is_random(bayes)
    several = bayes.outputs(x, samples=2)
    assert torch.equal(several[0], several[1]) != is_random(bayes)
    frozen = [bayes.sample(torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    a, b, c = (tensor_of(f(x)) for f in frozen)
    assert torch.equal(a, b)
    assert torch.equal(a, c) != is_random(bayes)


def test_all_at_once_equals_one_by_one(family: str, kind: str) -> None:
    bayes, x = (
        bayesian(family, kind).double(),
        KINDS[kind].input(),
    )  # float64: kernels differ in rounding only
    x = x.double() if x.is_floating_point() else x
    mean = bayes.merge().eval()
    draws = bayes.draw(3)
    together = bayes.outputs(x, draws=draws)
    assert bayes._needs_loop == (KINDS[kind].loops and is_random(bayes))
    chunked = bayes.outputs(x, draws=draws, chunk_size=2)
    bayes._needs_loop = True
    looped = bayes.outputs(x, draws=draws)
    torch.testing.assert_close(together, looped, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(chunked, looped, rtol=1e-9, atol=1e-10)
    dense = stacked_for(bayes, draws)
    for s in range(3):  # against the plain module under the dense draws: none of our machinery
        weights = {name: value[s] for name, value in dense.items()}
        expected = tensor_of(torch.func.functional_call(mean, weights, (x,), tie_weights=True))
        torch.testing.assert_close(looped[s], expected, rtol=1e-9, atol=1e-10)


def stacked_for(bayes: dubito.BayesianModule, draws: Draws) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for posterior, parts in zip(bayes.posteriors(), draws.components(bayes), strict=True):
        for s in range(len(draws)):
            made = posterior.dense(posterior.realize({n: t[s] for n, t in parts.items()}))
            for name, value in made.items():
                result.setdefault(name, value.new_empty(len(draws), *value.shape))[s] = value.detach()
    return result


def test_moments_of_draws(family: str, kind: str) -> None:
    """Standard errors from fourth moments, the level corrected for the number of entries."""
    bayes, count = bayesian(family, kind, dtype=torch.float64), 4000
    drawn = {name: value.detach().double() for name, value in stacked_draws(bayes, count).items()}
    means: dict[str, Tensor] = {}
    variances: dict[str, Tensor] = {}
    for posterior in bayes.posteriors():
        means.update(posterior.mean())
        variances.update(posterior.variance())
    assert set(drawn) == set(means) == set(variances) == set(bayes._slots)
    entries = 2 * sum(v.numel() for v in means.values())
    limit = float(
        torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - 1e-5 / max(entries, 1)).double())
    )
    for name, draws in drawn.items():
        assert means[name].shape == variances[name].shape == draws.shape[1:]
        centred, variance = draws - means[name], variances[name].clamp_min(1e-30)  # an entry may be fixed
        deviation = centred.mean(0) / (variance / count).sqrt()
        assert deviation.abs().max() < limit, f"mean of {name}"
        squares = centred.square()
        kurtosis = (squares.square().mean(0) / variance.square()).clamp_min(2.0)
        error = variance * ((kurtosis - 1) / count).sqrt()
        assert ((squares.mean(0) - variances[name]) / error).abs().max() < limit, f"variance of {name}"


# ---------------------------------------------------------------------------------------------------- exceptions


class Interruption(Exception):
    """Raised in the middle of a call."""


def test_an_exception_inside_a_call_leaves_everything_as_it_was(family: str, kind: str) -> None:
    bayes, x = bayesian(family, kind), KINDS[kind].input()
    expected = seeded_prediction(bayes, x)
    before = state_of(bayes)

    def interrupt(*_: Any) -> None:
        raise Interruption

    called: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, *_: called.append(m)) for m in bayes.module.modules()]
    bayes.outputs(x, samples=1)
    for handle in handles:
        handle.remove()
    for module in (bayes.module, called[len(called) // 2]):
        handle = module.register_forward_hook(interrupt)
        calls = {
            "a draw": lambda: bayes(x),
            "several draws": lambda: bayes.outputs(x, samples=2),
            "predict": lambda: bayes.predict(x, samples=2),
        }
        for name, call in calls.items():
            with pytest.raises(Interruption):
                call()
            assert state_of(bayes) == before, name
        handle.remove()
    assert torch.equal(seeded_prediction(bayes, x), expected)
