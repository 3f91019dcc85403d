"""The program that compares propagation with draws on unmodified networks: at a tiny size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from test_house import ROOT


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import propagation_table

    return propagation_table


def linear(program: Any) -> tuple[dubito.BayesianModule, Tensor]:
    torch.manual_seed(0)
    network = program.Network(nn.Linear(6, 4), torch.randn(5, 6), 0.2)
    return program.posterior(network), network.x


@torch.no_grad()
def test_a_linear_layer_agrees_with_its_draws(program: Any) -> None:
    bayes, x = linear(program)
    found = dubito.moments.propagated(bayes, x)
    drawn = program.moments_of_draws(bayes, x, 4000)
    figures = program.compared(found.mean, found.variance, drawn, bayes.module(x), 4000)
    assert figures["ratio"] == pytest.approx(1.0, abs=0.03)
    assert figures["correlation"] > 0.98
    assert figures["shift"] is None  # a linear layer's mean is that of the mean weights


@torch.no_grad()
def test_a_mean_shift_is_scored(program: Any) -> None:
    truth, at_mean, variance = torch.ones(50, dtype=torch.float64), torch.zeros(50), torch.rand(50) + 0.5
    drawn = (truth, variance.double())
    right = program.compared(truth.float(), variance, drawn, at_mean, 10**6)
    wrong = program.compared(at_mean, 2 * variance, drawn, at_mean, 10**6)
    assert right["shift"] == pytest.approx(1.0, abs=1e-3)
    assert wrong["shift"] == pytest.approx(0.0, abs=1e-3)
    assert wrong["ratio"] == pytest.approx(2.0)


def test_the_fraction_is_of_each_tensors_scale(program: Any) -> None:
    bayes, _ = linear(program)
    scale = bayes.module.weight.square().mean().sqrt()
    moments = dubito.moments.gaussian_weights(bayes)["weight"]
    torch.testing.assert_close(moments.variance.sqrt(), (0.2 * scale).expand(4, 6), rtol=1e-4, atol=1e-6)


def test_the_program_writes_its_table(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("before\n<!-- networks -->\nold\n<!-- /networks -->\nafter\n")
    options = ["--only", "ResNet by hand", "--draws", "4", "--json", str(rows), "--write", str(page)]
    assert program.main(options) == 0
    assert "25 exact, 1 approximate, 0 none" in capsys.readouterr().out
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| ResNet by hand | 14,538 | 0.1 | 25 / 1 / 0 | `cvp` |" in text
    assert [row.rules for row in program.kept_rows(rows)["ResNet by hand"]] == list(program.RULES)
    with pytest.raises(ValueError, match="has no lines"):
        program.write_block(page, "rules", "text")


def test_what_is_not_here_is_left_out(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    assert program.main(["--only", "MNIST CNN", "--draws", "2"]) == 0
    assert "MNIST CNN: left out" in capsys.readouterr().out


@torch.no_grad()
def test_rules_are_measured_on_what_arrives(program: Any) -> None:
    import propagation_rules

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            return self.norm(x + nn.functional.scaled_dot_product_attention(q, k, v))

    torch.manual_seed(0)
    network = program.Network(Encoder(), torch.randn(3, 4, 8))
    norms, attentions = propagation_rules.captured(program.posterior(network), network.x)
    assert len(norms) == len(attentions.kept) == 1
    errors = propagation_rules.norm_errors(norms, 2000)
    assert errors["jacobian"][0] < errors["expected-scale"][0]
    text = propagation_rules.rules_table(program.posterior, 50, network)
    assert "| attention × 1 | propagated | `delta` |" in text
