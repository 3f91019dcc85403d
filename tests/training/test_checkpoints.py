from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dubito.training import CheckpointError, load_checkpoint, save_checkpoint
from dubito.training.checkpoints import check_writable

tensors = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(12, dtype=torch.int64)[::2],
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.randn(3, 2).T.to(torch.bfloat16),
        torch.arange(5, dtype=torch.uint8),
    ]
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), tensors, st.just(torch.float64)
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


@settings(deadline=None, max_examples=25)
@given(trees)
def test_any_tree_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "a.safetensors"
    save_checkpoint(path, {"tree": tree})
    assert same(load_checkpoint(path), {"tree": tree})


def test_a_dict_with_our_own_marks_is_no_mark(tmp_path: Path) -> None:
    tree = {
        "kind": "tensor",
        "key": "x",
        "inner": {"kind": "list", "items": [1]},
        "a/b": {"c": torch.ones(1)},
    }
    tree["a"] = {"b/c": torch.zeros(2)}
    save_checkpoint(tmp_path / "a", tree)
    assert same(load_checkpoint(tmp_path / "a"), tree)


def test_tied_weights_are_stored_once_and_views_whole(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    path = save_checkpoint(tmp_path / "tied", {"a": weight, "b": weight, "view": weight[3:5, ::2]})
    assert path.stat().st_size < 1.2 * weight.numel() * 4
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["view"], weight[3:5, ::2])


def test_an_optimizer_state_survives(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), betas=(0.8, 0.9))
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "o", optimizer.state_dict())
    assert same(load_checkpoint(tmp_path / "o"), optimizer.state_dict())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'scheduler/lambda' is a function.*without pickle"):
        save_checkpoint(tmp_path / "f", {"scheduler": {"lambda": lambda step: step}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = save_checkpoint(tmp_path / "a", {"x": torch.ones(3)})

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(CheckpointError, match="disk full"):
        save_checkpoint(path, {"x": torch.zeros(3)})
    assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_ctrl_c_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "a", {"x": torch.ones(3)})

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"x": torch.zeros(3)})
    assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "none")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(CheckpointError, match="is not a dubito-checkpoint"):
        load_checkpoint(tmp_path / "other")
    path = save_checkpoint(tmp_path / "cut", {"x": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint_dir .* cannot be written"):
        check_writable(tmp_path / "file" / "folder")
