import json
import os
import re
import signal
import subprocess
import sys
import time
from types import MappingProxyType

import pytest
import torch

import dubito
from dubito import cli
from dubito.data import DATASETS, DatasetEntry, letters, split_images
from dubito.experiments import METHODS, Method

ARGUMENTS = ("compare", "--data", "tiny", "--epochs", "1")


@pytest.fixture
def tiny(monkeypatch):
    """A data set that needs nothing installed, under a name of its own."""

    def load(seed):
        return split_images("tiny", letters(160, 8, seed=100), (80, 20, 60), seed)

    known = MappingProxyType({**DATASETS, "tiny": DatasetEntry(load, "letters")})
    monkeypatch.setattr("dubito.data.registry.DATASETS", known)


def call(monkeypatch, *arguments):
    """Exit code of `dubito` with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["dubito", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        cli.main()
    except SystemExit as exit_:
        return exit_.code or 0
    finally:
        torch.set_num_threads(threads)
    return 0


def test_the_version(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"dubito {dubito.__version__}"


def test_compare_prints_a_table_and_writes_both_files(monkeypatch, capsys, tiny, tmp_path):
    folder = tmp_path / "out"
    code = call(
        monkeypatch, *ARGUMENTS, "--methods", "deterministic, low-rank-covariance", "--output", folder
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    results = json.loads((folder / "results.json").read_text())
    accuracy = results["runs"][0]["metrics"]["accuracy"]
    assert f"{100 * accuracy:.1f}" in out
    assert "low-rank" in out
    assert "Accuracy" in out
    assert results["complete"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "1/2 deterministic" in err
    written = {"report.html", "results.json", "certainty.png", "risk-coverage.png"}
    assert {p.name for p in folder.iterdir()} == written


def test_json_goes_to_standard_output_and_nothing_else_does(monkeypatch, capsys, tiny, tmp_path):
    code = call(monkeypatch, *ARGUMENTS, "--methods", "deterministic", "--json", "--output", tmp_path)
    out, _ = capsys.readouterr()
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "results.json").read_text())


def no_training(monkeypatch):
    monkeypatch.setattr("dubito.experiments.compare.compare", lambda *a, **k: pytest.fail("trained"))


def test_unknown_method_exits_2_and_lists_the_valid_ones(monkeypatch, capsys, tiny, tmp_path):
    no_training(monkeypatch)
    code = call(monkeypatch, *ARGUMENTS, "--methods", "deterministic,magic", "--output", tmp_path / "no")
    said = capsys.readouterr().err
    assert code == 2
    assert "magic" in said
    assert all(name in said for name in METHODS)
    assert not (tmp_path / "no").exists()


def test_unknown_data_exits_2_and_lists_the_valid_ones(monkeypatch, capsys, tmp_path):
    no_training(monkeypatch)
    code = call(monkeypatch, "compare", "--data", "cifar", "--output", tmp_path / "no")
    said = capsys.readouterr().err
    assert code == 2
    assert all(name in said for name in DATASETS)
    assert not (tmp_path / "no").exists()


def test_unwritable_folder_is_an_error_before_any_training(monkeypatch, capsys, tiny, tmp_path):
    no_training(monkeypatch)
    (tmp_path / "file").write_text("in the way")
    code = call(monkeypatch, *ARGUMENTS, "--output", tmp_path / "file" / "below")
    said = capsys.readouterr().err
    assert code == 2
    assert "cannot be written" in said
    assert "below" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "wrong", [("--epochs", "0"), ("--seeds", "0"), ("--epochs", "many"), ("--what", "1")]
)
def test_bad_options_exit_2(monkeypatch, capsys, tiny, tmp_path, wrong):
    no_training(monkeypatch)
    assert call(monkeypatch, "compare", "--data", "tiny", *wrong, "--output", tmp_path) == 2
    assert wrong[0] in capsys.readouterr().err


def test_missing_data_exits_1_with_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    code = call(monkeypatch, "compare", "--data", "mnist", "--output", tmp_path)
    said = capsys.readouterr().err
    assert code == 1
    assert "DUBITO_DATA" in said
    assert "Traceback" not in said


def interrupting(at: str):
    def train(job):
        raise KeyboardInterrupt

    table = dict(METHODS)
    table[at] = Method(table[at].title, table[at].summary, train)
    return MappingProxyType(table)


def test_interrupt_keeps_what_was_finished_and_exits_130(monkeypatch, capsys, tiny, tmp_path):
    monkeypatch.setattr("dubito.experiments.compare.METHODS", interrupting("low-rank-covariance"))
    code = call(monkeypatch, *ARGUMENTS, "--output", tmp_path)
    out, err = capsys.readouterr()
    assert code == 130
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["method"] for run in results["runs"]] == ["deterministic", "mean-field"]
    assert "interrupted" in (tmp_path / "report.html").read_text()
    assert "Accuracy" in out
    assert "kept" in err


def test_interrupt_before_anything_is_finished_exits_130_and_writes_nothing(
    monkeypatch, capsys, tiny, tmp_path
):
    monkeypatch.setattr("dubito.experiments.compare.METHODS", interrupting("deterministic"))
    assert call(monkeypatch, *ARGUMENTS, "--output", tmp_path) == 130
    assert "nothing to report" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_real_interrupt_exits_130_with_the_finished_run_on_the_disk(tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, "-c", "from dubito.cli import main; main()", "compare", "--data", "digits-8x8"]
    command += ["--epochs", "2", "--seeds", "50", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not (tmp_path / "results.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    results = json.loads((tmp_path / "results.json").read_text())
    assert 1 <= len(results["runs"]) < 200
    assert (tmp_path / "report.html").exists()
    assert "Traceback" not in err
    assert "Accuracy" in out


def test_help_names_every_option_data_set_and_method(monkeypatch, capsys):
    assert call(monkeypatch, "compare", "--help") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    for word in ("--data", "--methods", "--epochs", "--seeds", "--output", "--json", *METHODS, *DATASETS):
        assert word in said
