"""The process: exact batches within a task and their gradients, conjugate cases, likelihoods, settings."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dubito
from dubito.amortised import BNNProcess, ImportanceSamplingError, PrecisionError
from dubito.amortised.objectives import elbo, pp_avi
from dubito.amortised.posterior import importance_evidence
from dubito.likelihoods import Likelihood


def made(hidden: tuple[int, ...] = (6, 5), **options: object) -> BNNProcess:
    torch.manual_seed(0)
    likelihood = options.pop("likelihood", dubito.Gaussian(0.2, learned=True))
    return BNNProcess(1, 1, hidden, likelihood=likelihood, **options).double()  # type: ignore[arg-type]


def data(*sizes: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, 1, generator=generator, dtype=torch.float64) for n in sizes]
    return [(x, torch.sin(2 * x)) for x in xs]


@settings(deadline=None, max_examples=12)
@given(
    size=st.integers(1, 25),
    seed=st.integers(0, 99),
    inference=st.sampled_from(["layerwise", "shared"]),
    prior=st.sampled_from(["unit", "layer", "low-rank"]),
    residual=st.booleans(),
)
def test_batches_within_a_task_change_nothing(
    size: int, seed: int, inference: str, prior: str, residual: bool
) -> None:
    process = made((5, 5), inference=inference, prior=prior, residual=residual)
    batch = process.gather(data(23, 11))
    noise = process.noise(3, 2, torch.Generator().manual_seed(seed))
    whole = process.infer(batch, noise=noise)
    parts = process.infer(batch, noise=noise, batch_size=size)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(seed))
    turned = copy.copy(batch).__class__(*(t[:, order] for t in vars(batch).values()))
    shuffled = process.infer(turned, noise=noise, batch_size=size)
    for other in (parts, shuffled):
        for a, b in zip(whole.weights, other.weights, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(whole.kl, other.kl, atol=1e-9, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 4, 9])
def test_gradients_of_batches_are_those_of_the_whole(size: int) -> None:
    process = made()
    context, target = process.gather(data(9, 7)), process.gather(data(6, 6, seed=1))

    def gradients(batch_size: int | None) -> list[torch.Tensor]:
        process.zero_grad()
        noise = torch.Generator().manual_seed(4)
        pp_avi(process, context, target, 3, batch_size=batch_size, generator=noise).loss.backward()
        return [p.grad.clone() for p in process.parameters() if p.grad is not None]

    whole, parts = gradients(None), gradients(size)
    assert len(whole) > 10
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)


def test_padding_takes_no_part() -> None:
    process = made()
    noise = process.noise(3, 2, torch.Generator().manual_seed(0))
    together = process.infer(process.gather(data(12, 5)), noise=noise)
    alone = process.infer(process.gather(data(12, 5)[1:]), noise=tuple(n[:, 1:] for n in noise))
    torch.testing.assert_close(together.kl[:, 1:], alone.kl)
    for a, b in zip(together.weights, alone.weights, strict=True):
        torch.testing.assert_close(a[:, 1:], b)


def test_without_data_the_posterior_is_the_prior() -> None:
    process = made()
    drawn = process.infer(process.gather([(torch.zeros(0, 1), torch.zeros(0, 1))]), 50)
    torch.testing.assert_close(drawn.kl, torch.zeros_like(drawn.kl), atol=1e-9, rtol=0)
    torch.testing.assert_close(drawn.log_q, drawn.log_p)
    torch.testing.assert_close(process.prior.log_prob(drawn.weights), drawn.log_p)


def test_the_kl_is_the_mean_log_ratio_of_the_draws() -> None:
    process = made()
    drawn = process.infer(process.gather(data(10)), 4000)
    ratio = (drawn.log_q - drawn.log_p).detach()
    assert abs(float(ratio.mean() - drawn.kl.detach().mean())) < 4 * float(ratio.std()) / math.sqrt(4000)


def test_without_hidden_layers_it_is_bayesian_linear_regression() -> None:
    process = BNNProcess(2, 1, (), likelihood=dubito.Gaussian(0.3)).double()
    process.likelihood.log_noise.fill_(math.log(0.3))  # to float64's digits
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.5
    phi = torch.cat((x, torch.ones(10, 1)), dim=1)
    joint = phi @ phi.mT / 3 + 0.09 * torch.eye(10, dtype=torch.float64)
    posterior = process.condition(x, y, samples=4000, generator=generator)
    evidence = posterior.evidence(200, generator=generator)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(10).double(), joint)
    assert evidence.log_evidence == pytest.approx(float(marginal.log_prob(y[:, 0])), abs=1e-8)
    assert evidence.kl == pytest.approx(0.0, abs=1e-9)
    assert evidence.effective == pytest.approx(200)
    gain = torch.linalg.solve(joint, phi / 3).mT
    torch.testing.assert_close(posterior.weights[0].mean(0)[0], (gain @ y).squeeze(-1), atol=0.02, rtol=0)
    covariance = torch.eye(3).double() / 3 - gain @ phi / 3
    at = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    place = torch.cat((at, torch.ones(5, 1)), dim=1)
    predictive = posterior.predict(at)
    expected = (place @ covariance * place).sum(-1) + 0.09
    torch.testing.assert_close(predictive.variance[:, 0], expected, atol=0, rtol=0.08)
    bound = elbo(process, process.gather([(x, y)]), 4000, generator=generator)
    assert float(bound.value.detach()) == pytest.approx(evidence.log_evidence, abs=0.2)


def test_updating_the_last_layer_is_exact_without_hidden_layers() -> None:
    process = BNNProcess(1, 1, (), likelihood=dubito.Gaussian(0.3))
    ((x, y),) = data(20)
    both = process.condition(x, y, samples=5)
    updated = process.condition(x[:8], y[:8], samples=5).update(x[8:], y[8:])
    assert updated.approximate
    assert not both.approximate
    torch.testing.assert_close(updated._drawn.last.precision[0, 0], both._drawn.last.precision[0, 0])
    torch.testing.assert_close(updated._drawn.last.mean[0, 0], both._drawn.last.mean[0, 0])
    with pytest.raises(RuntimeError, match="updated"):
        updated.evidence()


def test_updating_leaves_hidden_layers_and_the_old_posterior_alone() -> None:
    process = made()
    ((x, y),) = data(20)
    before = process.condition(x[:8], y[:8], samples=5)
    function = before.sample_functions(x)
    after = before.update(x[8:], y[8:])
    torch.testing.assert_close(before.sample_functions(x), function)
    torch.testing.assert_close(after.weights[0], before.weights[0])
    assert not torch.equal(after.weights[-1], before.weights[-1])
    assert float((after.predict(x).mean - y).square().mean()) < float(
        (before.predict(x).mean - y).square().mean()
    )


@pytest.mark.parametrize(
    ("likelihood", "y", "kind"),
    [
        (dubito.HeteroscedasticGaussian(), torch.zeros(6, 2), "regression"),
        (dubito.Gaussian(0.1, features=2), torch.zeros(6, 2), "regression"),
        (dubito.Bernoulli(), torch.ones(6, 2), "bernoulli"),
        (dubito.Categorical(), torch.tensor([0, 1, 1, 0, 1, 0]), "categorical"),
    ],
)
def test_every_likelihood_scores_as_the_library_does(
    likelihood: Likelihood, y: torch.Tensor, kind: str
) -> None:
    torch.manual_seed(0)
    process = BNNProcess(1, 2, (4,), likelihood=likelihood)
    x = torch.randn(6, 1)
    posterior = process.condition(x, y, samples=7)
    predictive = posterior.predict(x)
    assert predictive.kind == kind
    outputs = posterior.sample_functions(x)
    expected = likelihood.log_prob(outputs, y.double() if y.is_floating_point() else y)
    torch.testing.assert_close(posterior.log_prob(x, y), expected.logsumexp(0) - math.log(7))
    torch.testing.assert_close(
        posterior.log_prob(x, y, joint=True), expected.sum(1).logsumexp(0) - math.log(7)
    )
    loss = pp_avi(process, process.gather([(x[:3], y[:3])]), process.gather([(x[3:], y[3:])]), 4).loss
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in process.inference.parameters())


def test_missing_outcomes_are_as_if_they_were_not_there() -> None:
    torch.manual_seed(0)
    process = BNNProcess(1, 2, (4,), likelihood=dubito.Gaussian(0.1), missing_outputs=True).double()
    x, y = torch.randn(6, 1).double(), torch.randn(6, 2).double()
    seen = torch.ones(6, 2, dtype=torch.bool)
    seen[2, 1] = False
    noise = process.noise(3, 1)
    first = process.infer(process.gather([(x, y, seen)]), noise=noise)
    y[2, 1] = 77.0
    second = process.infer(process.gather([(x, y, seen)]), noise=noise)
    torch.testing.assert_close(first.weights[-1], second.weights[-1])
    plain = BNNProcess(1, 2, (4,), likelihood=dubito.Gaussian(0.1))
    with pytest.raises(ValueError, match="missing_outputs=True"):
        plain.condition(x, y, observed=seen)


def test_functions_are_the_same_at_the_same_inputs() -> None:
    process = made()
    ((x, y),) = data(8)
    posterior = process.condition(x, y, samples=4, batch_size=3)
    at = torch.linspace(-1, 1, 9).unsqueeze(-1)
    torch.testing.assert_close(posterior.sample_functions(at)[:, ::2], posterior.sample_functions(at[::2]))
    assert process.sample_functions(at, 5).shape == (5, 9, 1)
    assert posterior.predict(at).samples == 4


def test_an_evidence_that_few_draws_carry_is_refused() -> None:
    with pytest.raises(ImportanceSamplingError, match=r"effective sample size is 1\.0 of 200"):
        importance_evidence(torch.cat((torch.zeros(199), torch.tensor([50.0]))).double())
    good = importance_evidence(torch.full((200,), -3.0, dtype=torch.float64))
    assert good.log_evidence == pytest.approx(-3.0)


def test_a_set_wide_network_refuses_batches() -> None:
    process = made(inference="set")
    ((x, y),) = data(8)
    process.condition(x, y, samples=2)
    with pytest.raises(ValueError, match="SetInference looks at the whole context"):
        process.condition(x, y, samples=2, batch_size=4)
    with pytest.raises(ValueError, match="whole context"):
        process.condition(x, y, samples=2).update(x, y)


def test_a_broken_layer_is_named_and_nothing_is_added_to_mend_it() -> None:
    process = made()
    with torch.no_grad():
        process.layers[1].prior.log_scale.free.fill_(float("nan"))
    ((x, y),) = data(8)
    with pytest.raises(PrecisionError, match="layer 1"):
        process.condition(x, y)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": (0,)}, "hidden: 0"),
        ({"activation": "sine"}, "activation='sine'"),
        ({"prior": "full"}, "prior='full'"),
        ({"inference": "mlp"}, "inference='mlp'"),
        ({"last_layer": "exact"}, "last_layer='exact'"),
    ],
)
def test_settings_outside_what_there_is_are_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BNNProcess(**{"dim_x": 1, "dim_y": 1, "hidden": (4,), "likelihood": dubito.Gaussian(), **change})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Categorical"):
        BNNProcess(1, 1, (4,), likelihood=torch.nn.Identity())  # type: ignore[arg-type]
