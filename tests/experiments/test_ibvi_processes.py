"""Jobs in several processes: everything arrives, errors come back, and rows do not depend on how many there are."""

import os
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch

from dubito.experiments.ibvi.comparison import ComparisonSettings, compare_ibvi, jobs_of
from dubito.experiments.ibvi.exam import Sizes
from dubito.experiments.ibvi.processes import WorkerDiedError, cores, in_processes

EPOCHS = {"lenet5": 1, "resnet": 1}


def test_every_piece_of_every_job_arrives_and_of_a_job_in_its_order() -> None:
    found = list(in_processes(range, [30, 3, 20], 2))
    assert Counter(found) == Counter([*range(30), *range(3), *range(20)])
    assert [n for n in found if n >= 20] == list(range(20, 30)), "these come from one job alone"


def test_an_error_comes_back_with_where_it_was_raised() -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer") as caught:
        list(in_processes(range, ["three"], 2))  # type: ignore[arg-type]
    assert any("raised in another process" in note for note in caught.value.__notes__)


def test_a_killed_process_is_said_and_does_not_hang() -> None:
    with pytest.raises(WorkerDiedError, match="code 3"):
        list(in_processes(os._exit, [3], 1))  # type: ignore[arg-type]


def test_there_is_a_core() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_methods_that_share_the_plain_network_are_one_job_and_the_longer_network_is_first() -> None:
    settings = ComparisonSettings(("mnist", "fashion-mnist"), ("lenet5", "resnet"), ("plain", "ibvi", "swag"))
    keys = [
        {"data": data, "network": network, "method": method, "seed": 0}
        for data in settings.data
        for network in settings.networks
        for method in settings.methods
    ]
    found = [(job.data, job.network, job.methods) for job in jobs_of(settings, keys)]
    assert found[:3] == [
        ("mnist", "resnet", ("plain", "swag")),
        ("mnist", "resnet", ("ibvi",)),
        ("mnist", "lenet5", ("plain", "swag")),
    ]
    assert len(found) == 8
    assert {data for data, _, _ in found[4:]} == {"fashion-mnist"}


def write_idx(folder: Path, name: str, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape)
    (folder / name).write_bytes(header + values.to(torch.uint8).numpy().tobytes())


@pytest.fixture
def bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two data sets of bright bars where the loaders look for them: other processes read them too."""
    generator = torch.Generator().manual_seed(0)
    for data in ("mnist", "fashion-mnist"):
        folder = tmp_path / data
        folder.mkdir()
        for part, count in (("train", 5100), ("t10k", 40)):
            labels = torch.arange(count) % 10
            images = torch.randint(0, 60, (count, 28, 28), generator=generator)
            images[torch.arange(count), 2 * labels + 3] = 255
            write_idx(folder, f"{part}-images-idx3-ubyte", images)
            write_idx(folder, f"{part}-labels-idx1-ubyte", labels)
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))


@pytest.mark.usefixtures("bars")
def test_rows_are_the_same_from_one_process_and_from_two(tmp_path: Path) -> None:
    settings = ComparisonSettings(
        ("mnist",), ("lenet5",), ("plain", "ibvi"), EPOCHS, 2, Sizes(60, 20, 20, 10, 10)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = compare_ibvi(settings)
        together = compare_ibvi(settings, tmp_path / "rows", processes=2)
    finally:
        torch.set_num_threads(before)
    assert [row["key"]["method"] for row in together] == ["plain", "ibvi"]
    assert [row["metrics"] for row in together] == [row["metrics"] for row in alone]
    again = compare_ibvi(settings, tmp_path / "rows", processes=2)
    assert again == together, "taken up, seconds and all"
