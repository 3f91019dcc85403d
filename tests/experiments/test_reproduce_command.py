import json
import sys
from types import MappingProxyType

import pytest
import torch

from dubito import cli
from dubito.experiments.reproduction import Outcome, Part, Reproduction
from dubito.plots import risk_coverage_curves
from dubito.report import Picture, Row, Table


@pytest.fixture
def paper(monkeypatch):
    """A reproduction of two parts under the name "paper"; `fails` makes the second raise what it holds."""
    fails = []

    def run(job):
        figure = risk_coverage_curves({"a": (torch.rand(9), torch.ones(9))})
        table = Table(("error",), (Row("ours", (f"{1.25:.2f}",)),))
        return Outcome(
            "Digits", ("words",), (table,), (Picture(figure, "a line"),), {"full": job.full}, {"low": True}
        )

    def second(job):
        if fails:
            raise fails[0]
        return run(job)

    parts = MappingProxyType({"one": Part("first", run), "two": Part("second", second)})
    known = MappingProxyType({"paper": Reproduction("paper", "A paper", "About it.", parts)})
    monkeypatch.setattr("dubito.experiments.reproductions.REPRODUCTIONS", known)
    return fails


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dubito", "reproduce", *map(str, arguments)])
    threads = torch.get_num_threads()
    try:
        cli.main()
    except SystemExit as exit_:
        return exit_.code or 0
    finally:
        torch.set_num_threads(threads)
    return 0


def test_tables_on_standard_output_and_files_in_the_folder(monkeypatch, capsys, paper, tmp_path):
    folder = tmp_path / "out"
    assert call(monkeypatch, "paper", "--output", folder, "--png") == 0
    out, err = capsys.readouterr()
    assert "1.25" in out
    assert "Shown: low." in out
    assert "1/2 one: first" in err
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["paper_one_1.png", "paper_two_1.png", "report.html", "results.json"]
    assert json.loads((folder / "results.json").read_text())["complete"]


def test_json_alone_goes_to_standard_output(monkeypatch, capsys, paper, tmp_path):
    assert call(monkeypatch, "paper", "--part", "one", "--full", "--json", "--output", tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert printed["parts"]["one"]["values"] == {"full": True}
    assert list(printed["parts"]) == ["one"]


def test_unknown_paper_or_part_exits_2_before_anything_is_made(monkeypatch, capsys, paper, tmp_path):
    assert call(monkeypatch, "magic", "--output", tmp_path / "no") == 2
    assert "there are paper" in capsys.readouterr().err
    assert call(monkeypatch, "paper", "--part", "one,magic", "--output", tmp_path / "no") == 2
    assert "there are one, two" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_folder_that_cannot_be_written_exits_2(monkeypatch, capsys, paper, tmp_path):
    (tmp_path / "file").write_text("")
    assert call(monkeypatch, "paper", "--output", tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(FileNotFoundError("no mnist here"), 1), (ImportError("not installed"), 1), (KeyboardInterrupt(), 130)],
)
def test_what_is_finished_is_told_when_a_later_part_fails(monkeypatch, capsys, paper, tmp_path, error, code):
    paper.append(error)
    assert call(monkeypatch, "paper", "--output", tmp_path) == code
    out, err = capsys.readouterr()
    assert "1.25" in out
    assert "not all parts were finished" in err
    assert str(error) in err
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["complete"]
    assert list(results["parts"]) == ["one"]


def test_nothing_finished_says_so(monkeypatch, capsys, paper, tmp_path):
    paper.append(FileNotFoundError("no mnist here"))
    assert call(monkeypatch, "paper", "--part", "two", "--output", tmp_path) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing to report" in err


def test_help_lists_papers_and_parts(monkeypatch, capsys):
    assert call(monkeypatch, "--help") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "bbb: Bayes by Backprop" in said
    assert "bandit: Thompson sampling" in said
    assert "DUBITO_DATA" in said
