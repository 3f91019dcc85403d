"""The Bayesian module: modes, draws, copies, ties, objectives on a conjugate model, errors for people."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import dubito
from dubito import LowRankCovariance, LowRankFactors, MeanField, Point, WeightPrior
from dubito.monte_carlo import Draws

D = torch.float64


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def inputs(n: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.embedding(tokens))
        return output


# -------------------------------------------------------------------------------------------------------- modes


def test_t34_train_draws_and_eval_runs_at_the_mean() -> None:
    bayes, x = dubito.bayesianize(mlp(), MeanField()), inputs()
    assert bayes.training
    assert not torch.equal(bayes(x), bayes(x))
    y = bayes(torch.ones(2, 4))
    torch.testing.assert_close(y[0], y[1], msg="one draw for the whole batch")
    bayes.eval()
    assert torch.equal(bayes(x), bayes(x))
    assert torch.equal(bayes(x), bayes.module(x))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    bayes(x)
    assert torch.equal(state, torch.get_rng_state()), "and draws nothing"


def test_forward_keeps_the_modules_own_signature() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
            """Own words."""
            return self.layer(x) * scale

    module = Net()
    bayes = dubito.bayesianize(module, MeanField())
    assert inspect.signature(bayes.forward) == inspect.signature(module.forward)
    assert list(inspect.signature(bayes.forward).parameters) == ["x", "mask", "scale"]
    x = torch.ones(1, 2)
    bayes.eval()
    torch.testing.assert_close(bayes(x, mask=None, scale=3.0), module(x, scale=3.0))
    torch.testing.assert_close(bayes.forward(x), module(x))
    with pytest.raises(TypeError, match="colour"):
        bayes(x, colour=1)


def test_the_module_stays_the_same_object_with_its_leaf_types() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Flatten())
    types = [type(m) for m in module.modules()]
    bayes = dubito.bayesianize(module, MeanField())
    assert bayes.module is module
    assert [type(m) for m in module.modules()] == types


# ------------------------------------------------------------------------------------------- samples and copies


def test_a_sample_is_a_frozen_consistent_function_that_later_training_does_not_change() -> None:
    for family in (MeanField(scale=0.5), LowRankCovariance(2), LowRankFactors(2, init="svd")):
        bayes, x = dubito.bayesianize(mlp(), family), inputs()
        frozen = bayes.sample(torch.Generator().manual_seed(0))
        assert type(frozen) is nn.Sequential
        assert not frozen.training
        assert not any(p.requires_grad for p in frozen.parameters())
        before = frozen(x).clone()
        torch.testing.assert_close(torch.cat([frozen(x[:2]), frozen(x[2:])]), before)
        optimizer = torch.optim.SGD(bayes.parameters(), lr=1.0)
        bayes(x).square().sum().backward()
        optimizer.step()
        assert torch.equal(frozen(x), before)
        with torch.no_grad():
            for p in frozen.parameters():
                p.zero_()
        assert bayes.eval()(x).abs().sum() > 0, "nor does it share storage"
        assert set(frozen.state_dict()) == set(mlp().state_dict())


def test_sample_and_draw_of_one_generator_are_draws_of_the_same_law() -> None:
    bayes, x = dubito.bayesianize(mlp(), MeanField(scale=0.5)), inputs(1)
    by_sample = torch.stack([bayes.sample()(x) for _ in range(400)])
    by_draw = bayes.outputs(x, samples=400).detach()
    error = ((by_sample.var(0) + by_draw.var(0)) / 400).sqrt()
    assert ((by_sample.mean(0) - by_draw.mean(0)) / error).abs().max() < 4


def test_merge_gives_a_plain_trainable_copy() -> None:
    module = mlp()
    module[2].bias.requires_grad_(False)
    bayes, x = dubito.bayesianize(module, {"0": LowRankFactors(2, init="svd"), "2": MeanField()}), inputs()
    plain = bayes.merge()
    assert type(plain) is nn.Sequential
    assert [type(p) for p in plain.parameters()] == [nn.Parameter] * 4
    assert [p.requires_grad for p in plain.parameters()] == [True, True, True, False]
    torch.testing.assert_close(plain(x), bayes.eval()(x))
    fresh = mlp()
    fresh.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fresh(x), plain(x))
    plain(x).sum().backward()
    assert all(p.grad is None for p in bayes.parameters())
    again = dubito.bayesianize(plain, MeanField())
    again(x).sum().backward()


def test_t33_copies_after_a_forward_pass_with_its_graph_alive() -> None:
    for family in (MeanField(), MeanField(estimator="local"), LowRankFactors(2, init="svd")):
        bayes, x = dubito.bayesianize(mlp(), family, likelihood=dubito.Categorical()), inputs()
        loss = bayes(x).sum()
        other = copy.deepcopy(bayes)
        averaged = torch.optim.swa_utils.AveragedModel(bayes)
        averaged.update_parameters(bayes)
        loss.backward()
        (other(x).sum() + other.kl()).backward()
        assert averaged.module.predict(x, samples=2).probs.isfinite().all()


def test_t25_means_follow_conversions_and_are_held_once() -> None:
    bayes, x = dubito.bayesianize(mlp(), MeanField()), inputs(dtype=D)
    bayes.double()
    with torch.no_grad():
        bayes.module[0].weight.fill_(0.25)
    torch.testing.assert_close(bayes.eval()(x), bayes.merge()(x))
    (first, *_) = bayes.posteriors()
    assert first.mean()["0.weight"] is bayes.module[0].weight
    assert first.mean()["0.weight"].dtype == D
    names = [n for n, _ in bayes.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names)) == 8


def test_state_dict_carries_plain_names_and_target_scales() -> None:
    bayes = dubito.bayesianize(mlp(), MeanField(), likelihood=dubito.Gaussian(learned=True))
    assert {f"module.{n}" for n in mlp().state_dict()} <= set(bayes.state_dict())
    bayes.set_target_scale(torch.tensor(3.0), torch.tensor(2.0))
    other = dubito.bayesianize(mlp(), MeanField(), likelihood=dubito.Gaussian(learned=True))
    other.load_state_dict(bayes.state_dict())
    assert other.target_shift is not None
    assert other.target_scale is not None
    assert (float(other.target_shift), float(other.target_scale)) == (3.0, 2.0)


# -------------------------------------------------------------------------------------------------------- ties


def test_tied_parameters_share_one_weight_one_draw_and_one_kl() -> None:
    tokens = torch.tensor([[1, 2, 6]])
    for family in (MeanField(scale=0.5), LowRankCovariance(2), LowRankFactors(2, init="svd")):
        bayes = dubito.bayesianize(Tied(), family)
        (posterior,) = bayes.posteriors()
        assert posterior.slots[0].aliases == ("embedding.weight", "output.weight")
        frozen = bayes.sample()
        assert frozen.embedding.weight is frozen.output.weight
        weight = frozen.embedding.weight
        torch.testing.assert_close(frozen(tokens), weight[tokens] @ weight.T)
        draws = bayes.draw(2, torch.Generator().manual_seed(0))
        drawn = [posterior.dense(posterior.realize({n: t[s] for n, t in c.items()}))["embedding.weight"]
                 for c in draws.components(bayes) for s in range(2)]  # fmt: skip
        expected = torch.stack([w[tokens] @ w.T for w in drawn])
        torch.testing.assert_close(bayes.outputs(tokens, draws=draws), expected, rtol=1e-4, atol=1e-5)
        merged = bayes.merge()
        assert merged.embedding.weight is merged.output.weight
        assert copy.deepcopy(bayes).sample().embedding.weight is not None
    assert set(dubito.bayesianize(Tied(), MeanField()).kl_by_parameter()) == {"embedding.weight"}


def test_t31_recurrent_weights_are_drawn_once_a_call_and_counted_once() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    bayes = dubito.bayesianize(lstm, MeanField(scale=0.5, prior=Normal(0.0, 1.0)), output=lambda o: o[0])
    x = torch.randn(2, 6, 3)
    calls = []
    for posterior in bayes.posteriors():
        original = posterior.training_weights
        posterior.training_weights = lambda o=original: (calls.append(1), o())[1]  # type: ignore[method-assign]
    whole = bayes(x)[0]
    assert len(calls) == 4, "one draw of each of four parameters, whatever the number of steps"
    assert whole.shape == (2, 6, 4)
    frozen = bayes.sample()
    state = None
    steps = []
    for t in range(6):
        output, state = frozen(x[:, t : t + 1], state)
        steps.append(output)
    torch.testing.assert_close(torch.cat(steps, 1), frozen(x)[0], rtol=1e-5, atol=1e-6)
    before = float(bayes.kl())
    bayes(x[:, :2])
    assert float(bayes.kl()) == pytest.approx(before)


def test_t37_padding_modes_and_other_settings_of_a_layer_are_kept() -> None:
    torch.manual_seed(0)
    for mode in ("circular", "reflect", "replicate", "zeros"):
        module = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
        x = torch.randn(1, 2, 5, 5)
        expected = module(x)
        bayes = dubito.bayesianize(module, MeanField(scale=1e-9))
        torch.testing.assert_close(bayes(x), expected)


def test_the_fused_path_of_an_encoder_layer_sees_the_draws() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    x = torch.randn(2, 3, 4)
    for family in (MeanField(scale=1.0), LowRankCovariance(2), LowRankFactors(2, init="svd")):
        bayes = dubito.bayesianize(copy.deepcopy(layer), {nn.Linear: family})
        bayes.module.eval()
        draws = bayes.draw(2)
        unfused = bayes.outputs(x, draws=draws).detach()
        bayes._needs_loop = True  # the loop under no_grad takes the fused path wherever torch allows it
        with torch.no_grad():
            fused = bayes.outputs(x, draws=draws)
            torch.testing.assert_close(fused, unfused, rtol=1e-4, atol=1e-5)
            assert not torch.allclose(fused[0], fused[1], atol=1e-2)
            assert not torch.allclose(fused[0], bayes.merge().eval()(x), atol=1e-2)
            assert not torch.allclose(bayes.sample()(x), bayes.sample()(x), atol=1e-2)


# --------------------------------------------------------------------------------------------- priors over groups


class Correlated(WeightPrior):
    """All weights together: N(0, I + 1 1ᵀ)."""

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        flat = torch.cat([w.reshape(-1) for w in weights.values()])
        covariance = torch.eye(len(flat), dtype=flat.dtype) + 1.0
        normal = torch.distributions.MultivariateNormal(torch.zeros_like(flat), covariance)
        return normal.log_prob(flat)


def test_a_joint_prior_enters_by_monte_carlo() -> None:
    module = nn.Linear(2, 1).to(D)
    bayes = dubito.bayesianize(module, MeanField(scale=0.5), prior=Correlated())
    mean = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    sd = torch.cat([p.sd().detach().reshape(-1) for p in bayes.posteriors()])  # type: ignore[attr-defined]
    q = torch.distributions.MultivariateNormal(mean, torch.diag(sd.square()))
    p = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=D), torch.eye(3, dtype=D) + 1.0)
    expected = float(torch.distributions.kl_divergence(q, p))
    value = bayes.kl(samples=500, generator=torch.Generator().manual_seed(0))
    assert float(value) == pytest.approx(expected, abs=0.2)
    assert set(bayes.kl_by_parameter()) == {"weight"}, "under the name of the first parameter"
    value.backward()
    assert all(p.grad is not None for p in bayes.parameters())
    with pytest.raises(dubito.CapabilityError, match=r"Correlated offers no KL by method='closed'"):
        bayes.kl(method="closed")


class Ridge(WeightPrior):
    """With a learned scale and a KL of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=D))

    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        normal = Normal(0.0, self.log_scale.exp())
        return torch.stack([normal.log_prob(w).sum() for w in weights.values()]).sum()

    def kl(self, posterior: Any) -> Tensor:
        parts = [
            torch.distributions.kl_divergence(
                Normal(p.slot.parameter, p.sd()), Normal(0.0, self.log_scale.exp())
            )
            for p in posterior
        ]
        return torch.stack([part.sum() for part in parts]).sum()


def test_a_joint_prior_with_a_kl_of_its_own_and_parameters_to_learn() -> None:
    prior = Ridge()
    bayes = dubito.bayesianize(mlp(D), MeanField(scale=0.3), prior=prior)
    assert sum(p is prior.log_scale for p in bayes.parameters()) == 1
    closed = bayes.kl()
    drawn = bayes.kl(method="monte_carlo", samples=500, generator=torch.Generator().manual_seed(0))
    assert float(closed) == pytest.approx(float(drawn), rel=0.05)
    closed.backward()
    assert prior.log_scale.grad is not None
    bayes(inputs(dtype=D))
    assert float(bayes.kl()) == pytest.approx(float(closed)), "a pending KL is not in its way"


# ------------------------------------------------------------------------------------------------ conjugate check


def regression() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data with correlated inputs, and the exact posterior's mean and precision (noise 0.5, prior N(0, 1))."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=D) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 1.0]], dtype=D
    )
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=D) + 0.5 * torch.randn(40, generator=generator, dtype=D)
    precision = x.T @ x / 0.25 + torch.eye(3, dtype=D)
    return x, y.unsqueeze(-1), torch.linalg.solve(precision, x.T @ y / 0.25), precision


def linear_regression() -> dubito.BayesianModule:
    torch.manual_seed(1)
    module = nn.Linear(3, 1, bias=False).to(D)
    return dubito.bayesianize(
        module, MeanField(prior=Normal(0.0, 1.0)), likelihood=dubito.Gaussian(noise=0.5).to(D)
    )


def test_mean_field_on_linear_regression_recovers_mean_and_inverse_diagonal_precision() -> None:
    """Noise whose first two moments are exact makes the expected loss, quadratic in the weights, exact."""
    x, y, mean, precision = regression()
    bayes = linear_regression()
    design = math.sqrt(3) * torch.cat([torch.eye(3, dtype=D), -torch.eye(3, dtype=D)]).unsqueeze(1)
    draws = Draws({"weight": {"eps": design}}, 6)
    optimizer = torch.optim.LBFGS(
        bayes.parameters(),
        lr=0.5,
        max_iter=300,
        tolerance_grad=1e-11,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        elbo = dubito.negative_elbo(bayes.nll(bayes.outputs(x, draws=draws), y), bayes.kl(), n_data=40)
        elbo.loss.backward()
        return elbo.loss

    for _ in range(5):
        loss = optimizer.step(closure)
    (posterior,) = bayes.posteriors()
    torch.testing.assert_close(posterior.mean()["weight"].reshape(-1), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        posterior.variance()["weight"].reshape(-1), 1 / precision.diagonal(), rtol=1e-4, atol=0.0
    )
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(40, dtype=D), x @ x.T + 0.25 * torch.eye(40, dtype=D)
    )
    gap = 40 * float(loss) + float(evidence.log_prob(y.squeeze(-1)))
    expected_gap = 0.5 * float(precision.diagonal().log().sum() - torch.logdet(precision))
    assert gap == pytest.approx(expected_gap, abs=1e-4), (
        "N·loss is the negative ELBO: short of the evidence by the KL"
    )


def test_a_users_loop_gets_there_too() -> None:
    x, y, mean, precision = regression()
    bayes = linear_regression()
    optimizer = torch.optim.Adam(dubito.parameter_groups(bayes, lr=0.03))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.996)
    torch.manual_seed(2)
    for _ in range(1000):
        optimizer.zero_grad()
        (bayes.nll(bayes(x), y) + bayes.kl() / 40).backward()
        optimizer.step()
        schedule.step()
    (posterior,) = bayes.posteriors()
    sd = precision.diagonal().rsqrt()
    assert ((posterior.mean()["weight"].reshape(-1) - mean) / sd).abs().max() < 0.25
    assert (posterior.variance()["weight"].reshape(-1).sqrt() / sd).log().abs().max() < 0.15


# ------------------------------------------------------------------------------------------------- bad input


def test_bad_arguments_of_bayesianize() -> None:
    module = mlp()
    before = [id(p) for p in module.parameters()]
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: dubito.bayesianize(torch.zeros(3), MeanField()), TypeError, "module must be an nn.Module, not Tensor"),
        (lambda: dubito.bayesianize(module, MeanField(), likelihood="softmax"), TypeError, "must be a Likelihood"),
        (lambda: dubito.bayesianize(module, MeanField(), likelihood=dubito.Categorical), TypeError, r"Categorical"),
        (lambda: dubito.bayesianize(module, MeanField(), prior="horseshoe"), ValueError, "unknown prior 'horseshoe'"),
        (lambda: dubito.bayesianize(module, MeanField(), prior=3.0), TypeError, "prior must be"),
        (lambda: dubito.bayesianize(module, MeanField(), output=0), TypeError, r"lambda o: o\[0\], not 0"),
    ]  # fmt: skip
    for call, error, match in cases:
        with pytest.raises(error, match=match):
            call()
        assert [id(p) for p in module.parameters()] == before
    bayes = dubito.bayesianize(module, MeanField())
    with pytest.raises(TypeError, match=r"already a BayesianModule.*merge\(\)"):
        dubito.bayesianize(bayes, MeanField())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "family", [MeanField(), LowRankCovariance(2), LowRankFactors(2, init="svd")], ids=str
)
def test_nan_in_a_parameter_is_refused_and_changes_nothing(bad: float, family: dubito.Family) -> None:
    module = mlp()
    with torch.no_grad():
        module[2].weight[0, 1] = bad
    before = [(n, id(p)) for n, p in module.named_parameters()]
    with pytest.raises(ValueError, match=r"'2\.weight' holds 1 NaN or infinite of 18 entries.*reload"):
        dubito.bayesianize(module, family)
    assert [(n, id(p)) for n, p in module.named_parameters()] == before


def test_wrong_inputs_keep_torchs_own_message() -> None:
    for family in (MeanField(), LowRankFactors(2, init="svd"), Point()):
        bayes = dubito.bayesianize(mlp(), family, likelihood=dubito.Categorical())
        for call in (
            bayes,
            lambda x, b=bayes: b.outputs(x, samples=2),
            lambda x, b=bayes: b.predict(x, samples=2),
        ):
            with pytest.raises(
                RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied|size mismatch"
            ):
                call(torch.zeros(2, 5))
            with pytest.raises(RuntimeError, match=r"dtype|Double"):
                call(torch.zeros(2, 4, dtype=D))


def test_an_output_that_is_no_tensor_needs_a_selector() -> None:
    torch.manual_seed(0)
    bayes = dubito.bayesianize(nn.LSTM(2, 3), MeanField(), likelihood=dubito.Categorical())
    x = torch.randn(4, 1, 2)
    assert isinstance(bayes(x), tuple), "a call returns what the network returns"
    with pytest.raises(TypeError, match=r"returned tuple, not a tensor.*output=lambda o: o\[0\]"):
        bayes.outputs(x, samples=2)
    with pytest.raises(TypeError, match="returned tuple"):
        bayes.predict(x, samples=2)
    chosen = dubito.bayesianize(nn.LSTM(2, 3), MeanField(), dubito.Categorical(), output=lambda o: o[0])
    assert chosen.predict(x, samples=2).probs.shape == (4, 1, 3)


def test_labels_out_of_range_and_missing_likelihood() -> None:
    bayes, x = dubito.bayesianize(mlp(), MeanField(), likelihood=dubito.Categorical()), inputs()
    with pytest.raises((ValueError, IndexError), match="3"):
        bayes.nll(bayes(x), torch.tensor([0, 1, 2, 3, 0]))
    without = dubito.bayesianize(mlp(), MeanField())
    for call in (lambda: without.nll(without(x), torch.zeros(5).long()), lambda: without.predict(x)):
        with pytest.raises(
            ValueError, match=r"no likelihood: classification and regression cannot be told apart"
        ):
            call()


def test_rescaling_the_spread() -> None:
    bayes = dubito.bayesianize(mlp(D), MeanField())
    before = [p.variance()[p.slots[0].name].clone() for p in bayes.posteriors()]
    bayes.rescale_spread_(0.5)
    for posterior, variance in zip(bayes.posteriors(), before, strict=True):
        torch.testing.assert_close(posterior.variance()[posterior.slots[0].name], 0.25 * variance)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"factor=.* must be a finite number of at least 0"):
            bayes.rescale_spread_(factor)


def test_an_embedding_that_renormalises_its_rows_does_so_to_the_draw() -> None:
    torch.manual_seed(0)
    for family in (MeanField(scale=1.0), LowRankFactors(2, init="svd")):
        embedding = nn.Embedding(5, 4, max_norm=0.1)
        given = embedding.weight.detach().clone()
        bayes = dubito.bayesianize(embedding, family)
        assert float(bayes(torch.tensor([0, 1])).norm(dim=-1).max()) < 0.1 + 1e-6
        if isinstance(family, MeanField):
            assert torch.equal(embedding.weight, given)
