"""Meta-learning: it learns, can be repeated, and leaves nothing half-changed when it fails."""

import pytest
import torch

import dubito
from dubito.amortised import BNNProcess, fit_process
from dubito.amortised.generators import SineTasks
from dubito.training import NonFiniteError


def process() -> BNNProcess:
    torch.manual_seed(0)
    return BNNProcess(
        1, 1, (16, 16), likelihood=dubito.Gaussian(0.1, learned=True), inference_hidden=(32, 32)
    )


@pytest.mark.slow
def test_sines_are_learned_within_a_minute() -> None:
    learner = process()
    source = SineTasks(points=(20, 50))
    result = fit_process(learner, source, steps=700, samples=2, context=(0.1, 0.6))
    assert result.steps == 700
    assert sum(result.losses[-20:]) < 0.3 * sum(result.losses[:20])
    tests = SineTasks(points=(80, 80))(24, torch.Generator().manual_seed(77))
    errors, inside = [], []
    for x, y in tests:
        predictive = learner.condition(
            x[:20], y[:20], samples=64, generator=torch.Generator().manual_seed(0)
        ).predict(x[20:])
        low, high = predictive.interval(0.95)
        errors.append((predictive.mean - y[20:]).square().mean())
        inside.append(((low <= y[20:]) & (y[20:] <= high)).double().mean())
    assert float(torch.stack(errors).mean().sqrt()) <= 0.15
    assert 0.90 <= float(torch.stack(inside).mean()) <= 1.0


@pytest.mark.parametrize("objective", ["avi", "npml", "npvi"])
def test_every_objective_makes_progress_and_can_be_repeated(objective: str) -> None:
    source = SineTasks(points=(6, 12))
    first, second = process(), process()
    results = [
        fit_process(p, source, objective=objective, steps=25, samples=2, tasks_per_step=3, seed=3)
        for p in (first, second)
    ]
    assert results[0].losses == results[1].losses
    losses = results[0].losses
    assert sum(losses[-8:]) < sum(losses[:8])


def test_a_list_is_used_up_before_it_is_shuffled_again_and_the_best_weights_are_kept() -> None:
    tasks = SineTasks(points=(6, 8))(6, torch.Generator().manual_seed(0))
    learner = process()
    said: list[str] = []
    result = fit_process(
        learner,
        tasks[:4],
        steps=12,
        samples=2,
        tasks_per_step=2,
        validation=tasks[4:],
        validate_every=4,
        say=said.append,
    )
    assert [step for step, _ in result.validation] == [4, 8, 12]
    assert result.best_step == max(result.validation, key=lambda pair: pair[1])[0]
    assert said[-1].startswith("step 12 of 12")


def test_held_weights_of_the_prior_do_not_move() -> None:
    learner = process()
    learner.prior.set_trainable(layers=[2])
    before = [layer.prior.covariance().detach().clone() for layer in learner.layers]
    fit_process(learner, SineTasks(points=(6, 8)), steps=5, samples=2, tasks_per_step=2, weight_decay=0.1)
    for index, layer in enumerate(learner.layers):
        same = torch.equal(layer.prior.covariance(), before[index])
        assert same == (index != 2)


def test_a_loss_that_is_no_number_puts_the_process_back() -> None:
    learner = process()
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    with pytest.raises(NonFiniteError, match="step 1"):
        fit_process(
            learner,
            [(torch.tensor([[0.0]]), torch.tensor([[1e155]], dtype=torch.float64))] * 2,
            steps=3,
            clip=None,
        )
    for name, value in learner.state_dict().items():
        assert torch.equal(value, before[name])


def test_bad_input() -> None:
    learner = process()
    good = (torch.zeros(3, 1), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="empty"):
        fit_process(learner, [])
    with pytest.raises(ValueError, match="task 1: x has 3 points and y 2"):
        fit_process(learner, [good, (torch.zeros(3, 1), torch.zeros(2, 1))])
    with pytest.raises(ValueError, match="objective='vi'"):
        fit_process(learner, [good], objective="vi")
    with pytest.raises(ValueError, match="steps=0"):
        fit_process(learner, [good], steps=0)
