"""Tasks as batches: padding, disjoint splits, and faults named by the task's index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.amortised.tasks import check_disjoint, gather_tasks, split_context

NAN = float("nan")


def tasks(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    start = 0
    made = []
    for size in sizes:  # every x is another number, and y follows it
        x = torch.arange(start, start + size).float().unsqueeze(-1)
        made.append((x, 10 * x))
        start += size
    return made


def test_unequal_tasks_are_padded_and_masked() -> None:
    batch = gather_tasks(tasks(3, 1), 1, 1)
    assert batch.x.shape == (2, 3, 1)
    assert batch.counts.tolist() == [3, 1]
    assert batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.x.dtype is torch.float64
    assert [len(c.x[0]) for c in batch.chunks(2)] == [2, 1]


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), low=st.floats(0, 0.9), seed=st.integers(0, 99)
)
def test_a_split_is_a_partition_of_every_task(sizes: list[int], low: float, seed: int) -> None:
    batch = gather_tasks(tasks(*sizes), 1, 1)
    generator = torch.Generator().manual_seed(seed)
    context, target = split_context(batch, (low, 0.95), generator)
    check_disjoint(context, target)
    assert int(target.counts.min()) >= 1
    for index in range(len(batch)):
        parts = [b.x[index, b.mask[index], 0].tolist() for b in (context, target)]
        assert sorted(parts[0] + parts[1]) == batch.x[index, batch.mask[index], 0].tolist()
        for part in (context, target):
            kept = part.mask[index]
            torch.testing.assert_close(part.y[index, kept], 10 * part.x[index, kept])
            assert not bool(part.observed[index, ~kept].any())


def test_targets_inside_the_context_are_refused_by_task() -> None:
    batch = gather_tasks(tasks(4, 4), 1, 1)
    context, target = batch.part(slice(0, 2)), batch.part(slice(2, 4))
    check_disjoint(context, target)
    mixed = gather_tasks(
        [tasks(4, 4)[0], (torch.tensor([[4.0], [7.0]]), torch.tensor([[40.0], [70.0]]))], 1, 1
    )
    both = gather_tasks([(torch.tensor([[9.0]]), torch.tensor([[9.0]])), tasks(4, 4)[1]], 1, 1)
    with pytest.raises(ValueError, match="task 1: 2 of its targets"):
        check_disjoint(both, mixed)


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        ((torch.zeros(3, 1), torch.zeros(2, 1)), "task 1: x has 3 points and y 2"),
        ((torch.tensor([[0.0], [NAN]]), torch.zeros(2, 1)), "task 1: x holds NaN or infinity at point 1"),
        (
            (torch.zeros(2, 1), torch.tensor([[float("inf")], [0.0]])),
            "task 1: y holds NaN or infinity at point 0",
        ),
        ((torch.zeros(2, 3), torch.zeros(2, 1)), r"task 1: x has shape \(2, 3\)"),
    ],
)
def test_faults_name_the_task(faulty: tuple[torch.Tensor, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gather_tasks([tasks(2)[0], faulty], 1, 1)


def test_other_bad_input() -> None:
    with pytest.raises(ValueError, match="empty"):
        gather_tasks([], 1, 1)
    with pytest.raises(TypeError, match="task 0"):
        gather_tasks([torch.zeros(2, 1)], 1, 1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"labels outside 0 … 2"):
        gather_tasks([(torch.zeros(2, 1), torch.tensor([0, 3]))], 1, 3, labels=True)
    with pytest.raises(TypeError, match="labels are integers"):
        gather_tasks([(torch.zeros(2, 1), torch.tensor([0.0, 1.0]))], 1, 3, labels=True)
    with pytest.raises(ValueError, match="context"):
        split_context(gather_tasks(tasks(2), 1, 1), (0.5, 1.0))


def test_missing_outcomes_are_masked_and_not_read() -> None:
    y = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    batch = gather_tasks([(torch.zeros(2, 1), y, ~y.isnan())], 1, 2)
    assert not batch.complete
    assert batch.y.tolist() == [[[1.0, 0.0], [2.0, 3.0]]]
