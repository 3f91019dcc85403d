"""HMC: the integrator, acceptance by fresh momentum and true energies, step sizes, and a conjugate posterior."""

import math
from typing import Any

import pytest
import torch
from conjugate import NOISE, assert_within_monte_carlo_error, exact, regression
from torch import Tensor, nn

import dubito
from dubito.mcmc import hmc
from dubito.mcmc import leapfrog as frog
from dubito.mcmc.step_size import DualAveraging, reasonable_step_size

# ------------------------------------------------------------------------------------------------- the integrator


def quartic(z: Tensor) -> tuple[Tensor, Tensor]:
    """U = Σ z⁴/4 + z²/2 + ½ (z₀ - z₁)²: neither harmonic nor separable."""
    gap = z[..., 0] - z[..., 1]
    gradient = z**3 + z
    gradient = gradient + torch.stack((gap, -gap), dim=-1)
    return (z**4 / 4 + z**2 / 2).sum(-1) + 0.5 * gap.square(), gradient


def beginning(count: int = 5) -> tuple[frog.State, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, momentum = torch.randn(2, count, 2, generator=generator, dtype=torch.float64)
    return frog.at(quartic, z), momentum


def test_leapfrog_is_reversible() -> None:
    state, momentum = beginning()
    end, away = frog.leapfrog(quartic, state, momentum, 0.1, 25)
    assert float((end.z - state.z).abs().max()) > 0.5
    back, returned = frog.leapfrog(quartic, end, -away, 0.1, 25)
    torch.testing.assert_close(back.z, state.z, rtol=0, atol=1e-12)
    torch.testing.assert_close(-returned, momentum, rtol=0, atol=1e-12)


def test_leapfrog_keeps_volume() -> None:
    """The determinant of the map (z, r) → (z', r') is 1."""

    def trajectory(point: Tensor) -> Tensor:
        z, r = point[:2], point[2:]
        for _ in range(4):
            r = r - 0.15 * quartic(z)[1]
            z = z + 0.3 * r
            r = r - 0.15 * quartic(z)[1]
        return torch.cat((z, r))

    state, momentum = beginning(1)
    point = torch.cat((state.z[0], momentum[0]))
    end, away = frog.leapfrog(quartic, state, momentum, 0.3, 4)
    torch.testing.assert_close(trajectory(point), torch.cat((end.z[0], away[0])))
    jacobian = torch.func.jacrev(trajectory)(point)
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-10)


def test_energy_error_is_of_second_order() -> None:
    state, momentum = beginning(50)

    def error(step_size: float) -> float:
        end, away = frog.leapfrog(quartic, state, momentum, step_size, round(0.8 / step_size))
        return float((frog.hamiltonian(end, away) - frog.hamiltonian(state, momentum)).abs().mean())

    errors = [error(step_size) for step_size in (0.04, 0.02, 0.01)]
    assert errors[0] > 1e-4
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.02)
    assert errors[1] / errors[2] == pytest.approx(4.0, rel=0.01)


# ------------------------------------------------------------------------------------------------- the acceptance


def standard(z: Tensor) -> tuple[Tensor, Tensor]:
    return 0.5 * z.square().sum(-1), z


def stationary_at_a_coarse_step(iterations: int = 60, chains: int = 4000) -> bool:
    """Whether chains from 3 end standard normal, with steps so coarse that without rejections the variance is 2.3."""
    torch.manual_seed(0)
    state = frog.at(standard, torch.full((chains, 1), 3.0, dtype=torch.float64))
    for _ in range(iterations):
        state = frog.iterate(standard, state, 1.5, 1).state
    z = state.z
    mean, variance = abs(float(z.mean())), abs(float(z.var()) - 1)
    return mean < 4 / chains**0.5 and variance < 4 * (2 / chains) ** 0.5


def test_the_target_is_stationary_however_coarse_the_steps() -> None:
    assert stationary_at_a_coarse_step()


def never_moved(accepted: Tensor, proposal: frog.State, current: frog.State) -> frog.State:
    return current


def always_accepted(log_uniform: Tensor, log_ratio: Tensor) -> Tensor:
    return log_uniform < log_ratio.exp()


class OldMomentum:
    """The current energy with the momentum at the end of the last trajectory."""

    def __init__(self) -> None:
        self.old: Tensor | None = None
        self.calls = 0

    def __call__(self, state: frog.State, momentum: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 1:  # the current state
            used = momentum if self.old is None else self.old
        else:
            used, self.old = momentum, momentum
        return state.energy + 0.5 * used.square().sum(-1)


@pytest.mark.parametrize(
    ("part", "slip"),
    [("selected", never_moved), ("accepts", always_accepted), ("hamiltonian", OldMomentum())],
    ids=["state never updated", "log u against the probability", "old momentum"],
)
def test_three_slips_known_from_public_code_would_be_found(
    part: str, slip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frog, part, slip)
    assert not stationary_at_a_coarse_step()


def test_momentum_is_fresh_for_each_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    original = frog.fresh_momentum

    def recorded(z: Tensor) -> Tensor:
        drawn.append(original(z))
        return drawn[-1]

    monkeypatch.setattr(frog, "fresh_momentum", recorded)
    torch.manual_seed(1)
    state = frog.at(standard, torch.zeros(2000, 1, dtype=torch.float64))
    for _ in range(3):
        step = frog.iterate(standard, state, 0.5, 2)
        end, away = frog.leapfrog(standard, state, drawn[-1], 0.5, 2)
        expected = (frog.hamiltonian(state, drawn[-1]) - frog.hamiltonian(end, away)).clamp(max=0).exp()
        torch.testing.assert_close(step.probability, expected)
        assert float(step.accepted.double().mean()) == pytest.approx(float(expected.mean()), abs=0.02)
        state = step.state
    assert len(drawn) == 3
    stacked = torch.stack(drawn).squeeze(-1)
    torch.testing.assert_close(torch.corrcoef(stacked), torch.eye(3).double(), atol=0.1, rtol=0)


def test_a_proposal_without_a_density_is_rejected_and_counted() -> None:
    def walled(z: Tensor) -> tuple[Tensor, Tensor]:
        energy, gradient = standard(z)
        outside = z.abs().amax(-1) > 1
        return torch.where(outside, torch.full_like(energy, torch.nan), energy), gradient

    torch.manual_seed(0)
    state = frog.at(walled, torch.zeros(500, 1, dtype=torch.float64))
    divergent = 0
    for _ in range(20):
        step = frog.iterate(walled, state, 0.9, 1)
        state, divergent = step.state, divergent + int(step.divergent.sum())
    assert bool((state.z.abs() <= 1).all())
    assert divergent > 500
    assert float(state.z.std()) == pytest.approx(0.54, abs=0.06)  # the truncated normal's


# ------------------------------------------------------------------------------------------------------ step size


def test_dual_averaging_finds_the_step_of_the_wanted_acceptance() -> None:
    torch.manual_seed(0)
    state = frog.at(standard, torch.randn(200, 20, dtype=torch.float64))
    start = reasonable_step_size(standard, state)
    assert 0.3 < start < 3.0
    adaptation = DualAveraging(start, target=0.8)
    for _ in range(150):
        step = frog.iterate(standard, state, adaptation.current, 3)
        state = step.state
        adaptation.update(float(step.probability.mean()))
    found = []
    for _ in range(30):
        step = frog.iterate(standard, state, adaptation.averaged, 3)
        state = step.state
        found.append(float(step.probability.mean()))
    assert sum(found) / 30 == pytest.approx(0.8, abs=0.04)


def test_a_flat_density_has_no_step_size() -> None:
    def flat(z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(z)), torch.zeros_like(z)

    with pytest.raises(RuntimeError, match="no step size"):
        reasonable_step_size(flat, frog.at(flat, torch.zeros(2, 1)))


# ------------------------------------------------------------------------------------------------------- networks


def test_a_conjugate_posterior_is_recovered() -> None:
    net, x, y = regression()
    result = hmc(
        net, torch.distributions.Normal(0.0, 1.0), x, y, dubito.Gaussian(NOISE), samples=250, warmup=80, chains=12,
        leapfrog_steps=5, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    mean, covariance = exact(x, y)
    assert_within_monte_carlo_error(result, mean, covariance)
    assert float(result.convergence.r_hat) < 1.01
    assert max(float(c.r_hat.max()) for c in result.weight_convergence().values()) < 1.01
    assert int(result.divergences.sum()) == 0
    assert 0.7 < float(result.acceptance.mean()) < 0.97
    phi = torch.cat([x, torch.ones(30, 1)], dim=1).double()
    predictive = result.predict(x)
    scale = float((phi @ covariance * phi).sum(1).sqrt().max())
    assert float((predictive.mean.squeeze(-1) - phi @ mean).abs().max()) < 0.2 * scale
    assert float(predictive.aleatoric.mean()) == pytest.approx(NOISE**2)


def test_chains_are_repeatable_and_leave_the_global_generator_alone() -> None:
    net, x, y = regression()
    options: dict[str, Any] = {"samples": 5, "warmup": 3, "chains": 2, "leapfrog_steps": 2}

    def run(seed: int) -> Tensor:
        with pytest.warns(dubito.DubitoWarning):  # five draws have not mixed
            result = hmc(
                net,
                "fan_in",
                x,
                y,
                dubito.Gaussian(),
                generator=torch.Generator().manual_seed(seed),
                **options,
            )
        return result.draws["weight"]

    before = torch.get_rng_state()
    first, again, other = run(1), run(1), run(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_divergences_and_chains_that_do_not_mix_are_warned_of() -> None:
    net, x, y = regression()
    with pytest.warns(
        dubito.DubitoWarning, match=r"R-hat of the log density is inf.*40 of 40 trajectories diverged"
    ):
        result = hmc(
            net, "fan_in", x, y, dubito.Gaussian(0.01), samples=10, warmup=0, step_size=50.0, chains=4
        )
    assert int(result.divergences.sum()) == 40
    assert float(result.acceptance.max()) == 0.0
    assert "40 divergences" in repr(result)


def test_a_small_network_is_sampled_and_summarised() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.linspace(-2, 2, 20).unsqueeze(-1)
    y = x.sin() + 0.1 * torch.randn(20, 1)
    with pytest.warns(dubito.DubitoWarning, match="not mixed"):  # chains so short have not
        result = hmc(
            net, torch.distributions.Normal(0.0, 1.5), x, y, dubito.Gaussian(0.2), samples=30, warmup=60, chains=4,
            leapfrog_steps=8, generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
    assert {name: value.shape for name, value in result.draws.items()} == {
        name: torch.Size((4, 30, *p.shape)) for name, p in net.named_parameters()
    }
    assert float((result.predict(x).mean - x.sin()).square().mean().sqrt()) < 0.2
    of_functions = result.function_convergence(x)
    assert of_functions.r_hat.shape == (20, 1)
    text = result.summary(x)
    assert "function values" in text
    assert "not identified" in text
    assert math.isfinite(result.gradient_evaluations)
    assert result.gradient_evaluations >= 4 * 90 * 8
