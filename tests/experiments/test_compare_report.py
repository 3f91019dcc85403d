import pytest

from dubito.data import letters, split_images
from dubito.experiments import METHODS
from dubito.experiments.compare import Comparison, compare
from dubito.experiments.compare_report import report, table
from dubito.report import render


@pytest.fixture(scope="module")
def finished() -> Comparison:
    split = split_images("tiny", letters(160, 8, seed=100), (80, 20, 60))
    return compare(split, ["deterministic", "low-rank-covariance"], epochs=1, samples=2)


@pytest.fixture(scope="module")
def page(finished) -> str:
    return render(report(finished))


def test_the_page_has_the_table_and_every_picture(finished, page):
    for row in table(finished).rows:
        assert row.label in page
        assert all(cell in page for cell in row.cells)
    for name in finished.finished:
        assert METHODS[name].summary in page.replace("&#x27;", "'")
    # a reliability diagram, a histogram and a grid of images a method; curves and bars for all together
    assert page.count("<svg") == 3 * 2 + 2
    assert page.count('role="img"') == page.count("<svg")
    images = 3 * 6 * 2
    assert page.count("data:image/png;base64") == images


def test_the_words_state_the_noise_of_the_test_set(finished, page):
    values = [run.metrics["accuracy"] for run in finished.runs]
    accuracy = sum(values) / 2
    assert f"± {100 * (accuracy * (1 - accuracy) / 60) ** 0.5:.1f} points" in page


def test_nothing_finished_is_nothing_to_report():
    empty = Comparison("tiny", ("deterministic",), (0,), 1, 1)
    with pytest.raises(ValueError, match="nothing to report"):
        report(empty)
