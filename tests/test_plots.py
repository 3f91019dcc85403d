import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure

from dubito import plots
from dubito.metrics import reliability


@pytest.fixture
def classified():
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(400, 5, generator=generator)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator).squeeze(1)


def all_figures(probs, y):
    confidence, wrong = probs.max(-1).values, (probs.argmax(-1) != y).double()
    entropy = -(probs * probs.log()).sum(-1)
    return {
        "reliability": plots.reliability_diagram(probs, y, title="a <&> b"),
        "risk": plots.risk_coverage_curves({"one": (confidence, wrong), "two": (entropy, wrong)}),
        "ood": plots.ood_histogram(entropy[:200], entropy[200:] + 0.3, "title"),
        "bars": plots.grouped_bars({"one": {"a": 0.1, "b_c": 0.2}, "two": {"a": 0.3, "b_c": 0.4}}, "error"),
        "grid": plots.image_grid(torch.rand(7, 1, 8, 8), [f"{i}\nis" for i in range(7)], columns=3),
    }


def test_every_plot_is_a_figure_and_a_readable_svg(classified):
    for name, figure in all_figures(*classified).items():
        assert isinstance(figure, Figure)
        svg = plots.to_svg(figure, f"what {name} shows: 3 < 4", name)
        root = ElementTree.fromstring(f'<r xmlns:xlink="http://www.w3.org/1999/xlink">{svg}</r>')[0]
        assert root.get("role") == "img"
        assert root[0].tag == "title"
        assert root[0].text == f"what {name} shows: 3 < 4"
        ids = [e.get("id") for e in root.iter() if e.get("id")]
        assert len(ids) == len(set(ids))
        assert all(i.startswith(f"{name}-") for i in ids)
        for reference in re.findall(r'(?:url\(#|href="#)([^)"]+)', svg):
            assert reference in ids
        for address in re.findall(r'href="([^"]*)"', svg):
            assert address.startswith(("#", "data:")), address
        assert "currentColor" in svg
        assert plots.INK not in svg
        assert "<style" not in svg
        assert len(svg) < 60_000


def test_svg_is_deterministic(classified):
    first, second = (plots.to_svg(plots.reliability_diagram(*classified), "x", "p") for _ in range(2))
    assert first == second


def test_reliability_bars_are_the_accuracies(classified):
    figure = plots.reliability_diagram(*classified, bins=10)
    table = reliability(*classified, bins=10)
    heights = torch.tensor([bar.get_height() for bar in figure.axes[0].patches], dtype=torch.float64)
    assert torch.allclose(heights, table.accuracy[table.count > 0])
    counts = [int(bar.get_height()) for bar in figure.axes[1].patches]
    assert sum(counts) == 400


def test_risk_coverage_ends_at_the_error_rate(classified):
    probs, y = classified
    wrong = (probs.argmax(-1) != y).double()
    figure = plots.risk_coverage_curves({"one": (probs.max(-1).values, wrong)})
    x, end = figure.axes[0].lines[0].get_data()
    assert len(x) <= 200
    assert x[-1] == pytest.approx(100)
    assert end[-1] == pytest.approx(100 * wrong.mean().item())


def test_histograms_are_shares(classified):
    figure = plots.ood_histogram(torch.rand(50), torch.rand(10))
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert sum(heights) == pytest.approx(200, abs=1e-3)


def test_constant_scores_are_drawn():
    figure = plots.ood_histogram(torch.zeros(5), torch.zeros(5))
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == pytest.approx(200, abs=1e-3)


def test_bad_input_is_explained(classified):
    with pytest.raises(ValueError, match="finite"):
        plots.ood_histogram(torch.tensor([0.1, float("nan")]), torch.rand(3))
    with pytest.raises(ValueError, match="at least one"):
        plots.ood_histogram(torch.rand(3), torch.rand(0))
    with pytest.raises(ValueError, match="empty"):
        plots.risk_coverage_curves({})
    with pytest.raises(ValueError, match="same categories"):
        plots.grouped_bars({"one": {"a": 1.0}, "two": {"b": 1.0}}, "x")
    with pytest.raises(ValueError, match="one caption"):
        plots.image_grid(torch.rand(2, 1, 4, 4), ["a"])
    with pytest.raises(ValueError, match="1 or 3"):
        plots.image_grid(torch.rand(2, 2, 4, 4), ["a", "b"])
    figure = plots.reliability_diagram(*classified)
    with pytest.raises(ValueError, match="words"):
        plots.to_svg(figure, " ", "p")
    with pytest.raises(ValueError, match="prefix"):
        plots.to_svg(figure, "x", "1 2")


def test_save_png(tmp_path, classified):
    path = plots.save_png(plots.reliability_diagram(*classified), tmp_path / "a.png", dpi=40)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_importing_plots_leaves_matplotlib_out_and_drawing_leaves_pyplot_out():
    code = (
        "import sys, torch; from dubito import plots; assert 'matplotlib' not in sys.modules; "
        "plots.image_grid(torch.rand(1, 3, 4, 4), ['a']); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
