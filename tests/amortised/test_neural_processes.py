"""Neural processes: what a context may and may not change, and that they learn."""

import math

import pytest
import torch

import dubito
from dubito.amortised.fitting import fit_process, predictive_density
from dubito.amortised.generators import SineTasks
from dubito.amortised.neural_processes import (
    ConditionalProcess,
    LatentProcess,
    NeuralProcess,
    TransformerProcess,
)

KINDS = [ConditionalProcess, LatentProcess, TransformerProcess]


def made(kind: type[NeuralProcess], **options: object) -> NeuralProcess:
    torch.manual_seed(0)
    return kind(1, 1, 16, **options)  # type: ignore[arg-type]


def data(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.sin(2 * x)


@pytest.mark.parametrize("kind", KINDS)
def test_order_padding_and_other_targets_change_nothing(kind: type[NeuralProcess]) -> None:
    process = made(kind).double()
    x, y = data(6)
    at = torch.linspace(-2, 2, 7, dtype=torch.float64).unsqueeze(-1)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    seed = torch.Generator().manual_seed
    expected = process.condition(x, y, samples=3, generator=seed(0)).sample_functions(at)
    turned = process.condition(x[order], y[order], samples=3, generator=seed(0))
    torch.testing.assert_close(turned.sample_functions(at), expected)
    torch.testing.assert_close(turned.sample_functions(at[::3]), expected[:, ::3])
    both = process.gather([(x, y), data(9)])
    state = process.encode(both, 1)
    if kind is not LatentProcess:
        padded = process.outputs(state, at.expand(2, -1, -1))[:, 0]
        torch.testing.assert_close(padded, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_context_changes_predictions_and_may_be_empty(kind: type[NeuralProcess]) -> None:
    process = made(kind).double()
    x, y = data(6)
    seed = torch.Generator().manual_seed
    given = process.condition(x, y, samples=2, generator=seed(0)).sample_functions(x)
    other = process.condition(x, -y, samples=2, generator=seed(0)).sample_functions(x)
    assert not torch.equal(given, other)
    empty = process.condition(x[:0], y[:0], samples=2, generator=seed(0)).sample_functions(x)
    assert bool(empty.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "likelihood", [dubito.Gaussian(0.2, learned=True), dubito.Bernoulli(), dubito.Categorical()]
)
def test_scores_are_the_likelihoods(kind: type[NeuralProcess], likelihood: dubito.Likelihood) -> None:
    torch.manual_seed(0)
    process = kind(1, 2, 8, likelihood=likelihood)
    x, _ = data(5)
    y = torch.tensor([0, 1, 1, 0, 1])
    if not isinstance(likelihood, dubito.Categorical):
        y = torch.stack((y, 1 - y), dim=-1).double()  # type: ignore[assignment]
    posterior = process.condition(x, y, samples=4)
    scores = likelihood.log_prob(posterior.sample_functions(x), y)
    torch.testing.assert_close(posterior.log_prob(x, y), scores.logsumexp(0) - math.log(len(scores)))
    assert len(posterior.predict(x)) == 5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ConditionalProcess, {}),
        (LatentProcess, {}),
        (LatentProcess, {"variational": True}),
        (TransformerProcess, {}),
    ],
)
def test_they_learn(kind: type[NeuralProcess], options: dict[str, object]) -> None:
    process = made(kind, **options)
    source = SineTasks(points=(10, 20))
    tasks = source(8, torch.Generator().manual_seed(9))
    context = process.gather([(x[:5], y[:5]) for x, y in tasks])
    target = process.gather([(x[5:], y[5:]) for x, y in tasks])
    before = float(predictive_density(process, context, target))
    result = fit_process(process, source, tasks, steps=60, samples=2, tasks_per_step=8, lr=3e-3)
    assert float(predictive_density(process, context, target)) > before
    assert sum(result.losses[-10:]) < sum(result.losses[:10])


def test_the_latents_kl_is_that_of_its_gaussians() -> None:
    process = LatentProcess(1, 1, 8, variational=True).double()
    x, y = data(8)
    context, whole = process.gather([(x[:4], y[:4])]), process.gather([(x, y)])
    state = process.encode(context, 5, whole)
    q, p = process.latent(whole), process.latent(context)
    draws = q.sample((20_000,))
    ratio = (q.log_prob(draws) - p.log_prob(draws)).sum(-1).detach()
    assert float(state.kl.detach()) == pytest.approx(float(ratio.mean()), abs=4 * float(ratio.std()) / 141)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="width=0"):
        ConditionalProcess(1, 1, 0)
    with pytest.raises(ValueError, match="heads=3"):
        TransformerProcess(1, 1, 16, heads=3)
