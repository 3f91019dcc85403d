from types import MappingProxyType

import pytest

from dubito.experiments.reproduction import (
    Outcome,
    Part,
    Reproduction,
    UnknownReproductionError,
    chosen_parts,
    reproduce,
)
from dubito.experiments.reproductions import REPRODUCTIONS, find_reproduction
from dubito.report import Row, Table, render


def part(name, seen):
    def run(job):
        seen.append((name, job.full, job.seeds))
        job.say(f"in {name}")
        table = Table(("a",), (Row("r", (f"cell of {name}",)),))
        return Outcome(name, ("words",), (table,), (), {"n": 1}, {"it holds": name == "one"})

    return Part(f"does {name}", run)


@pytest.fixture
def paper():
    seen = []
    parts = MappingProxyType({name: part(name, seen) for name in ("one", "two", "three")})
    return Reproduction("paper", "A paper", "About it.", parts), seen


def test_parts_run_in_the_papers_order_whatever_the_order_asked(paper):
    reproduction, seen = paper
    said, sizes = [], []
    result = reproduce(
        reproduction, ["three", "one"], full=True, seeds=2, say=said.append,
        on_part=lambda r: sizes.append((len(r.outcomes), r.complete)),
    )  # fmt: skip
    assert seen == [("one", True, (0, 1)), ("three", True, (0, 1))]
    assert said[:2] == ["1/2 one: does one", "in one"]
    assert sizes == [(1, False), (2, True)]
    assert result.complete


def test_results_tell_targets_met_and_missed(paper):
    result = reproduce(paper[0], ["one", "two"])
    parts = result.as_dict()["parts"]
    assert parts["one"]["targets"] == {"it holds": True}
    assert parts["two"]["targets"] == {"it holds": False}
    page = render(result.report())
    assert "Shown: it holds." in page
    assert "Not shown: it holds." in page
    assert "cell of two" in page


def test_nothing_finished_is_no_report(paper):
    result = reproduce(paper[0])
    result.outcomes.clear()
    with pytest.raises(ValueError, match="nothing to report"):
        result.report()


def test_unknown_names_list_those_there_are(paper):
    with pytest.raises(UnknownReproductionError, match="'four'; there are one, two, three"):
        chosen_parts(paper[0], ["four"])
    with pytest.raises(UnknownReproductionError, match=r"'nope'; there are .*bbb"):
        find_reproduction("nope")
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        reproduce(paper[0], seeds=0)


def test_bayes_by_backprop_is_registered_with_its_three_parts():
    assert list(REPRODUCTIONS["bbb"].parts) == ["mnist", "regression", "bandit"]
    assert all(name == entry.name for name, entry in REPRODUCTIONS.items())
