"""Networks that nobody rewrote: the eager propagation against Monte Carlo, and against the exported graph."""

import copy
from typing import Any

import pytest
import torch
from propagated_networks import BATCH, NETWORKS
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import dubito
from dubito.moments import Context, compiled, gaussian_weights, propagated, report
from dubito.moments.coverage import tensors_of
from dubito.moments.elementwise import compiler_found
from dubito.moments.exported import export_network

pytest.importorskip("transformers")


def made(name: str, sd: float = 0.05) -> tuple[dubito.BayesianModule, Any]:
    torch.manual_seed(0)
    module, x = NETWORKS[name]()
    bayes = dubito.bayesianize(module.eval(), dubito.MeanField(scale=sd), likelihood=dubito.Categorical())
    return bayes, x


def doubled(x: Any) -> Any:
    return tree_map(lambda t: torch.cat((t, t)) if isinstance(t, Tensor) else t, x)


# Variances of sums over positions that share weights are too small, by design of independent entries.
RATIOS = {"resnet_by_hand": 0.2, "resnet": 0.3, "encoder_with_padding": 0.2}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_runs_and_agrees_with_draws(name: str) -> None:
    bayes, x = made(name)
    moments = propagated(bayes, x)
    draws = bayes.outputs(x, draws=bayes.draw(100, torch.Generator().manual_seed(1)), chunk_size=25)
    assert moments.mean.shape == moments.variance.shape == draws.shape[1:]
    assert bool(torch.isfinite(moments.mean).all() & torch.isfinite(moments.variance).all())
    assert bool((moments.variance > 0).all())
    sd = draws.std(0)
    assert float(((moments.mean - draws.mean(0)) / sd).abs().mean()) < 0.2
    ratio = float((moments.variance / sd.square()).median())
    assert RATIOS.get(name, 0.7) < ratio < 1.3


@pytest.mark.parametrize("name", ["resnet_by_hand", "encoder_with_padding", "gpt2_eager"])
@torch.no_grad()
def test_the_exported_graph_agrees(name: str) -> None:
    bayes, x = made(name)
    eager_sites: list[str] = []
    graph_sites: list[str] = []
    eager = propagated(bayes, x, Context(record=lambda site, _: eager_sites.append(site)))
    network = export_network(bayes.module, x, bayes.select, list(bayes._slots.values()))
    context = Context(record=lambda site, _: graph_sites.append(site))
    graph = network.run(gaussian_weights(bayes), tensors_of(x), context)
    torch.testing.assert_close(graph.mean, eager.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(graph.variance, eager.variance, atol=1e-8, rtol=1e-5)
    assert graph_sites == eager_sites
    assert context.seen == set(bayes._slots)
    larger = network.run(gaussian_weights(bayes), tensors_of(doubled(x)), Context())
    torch.testing.assert_close(larger.mean[:BATCH], eager.mean, atol=1e-5, rtol=1e-5)


def small() -> tuple[dubito.BayesianModule, Tensor]:
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    )
    network = nn.Sequential(features, nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 3))
    bayes = dubito.bayesianize(network, dubito.MeanField(), likelihood=dubito.Categorical())
    return bayes, torch.randn(BATCH, 3, 6, 6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_compiled_agrees(backend: str) -> None:
    bayes, x = small()
    check_compiled(bayes, x, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multihead_attention", "resnet_by_hand"])
@torch.no_grad()
def test_compiled_networks_agree(name: str) -> None:
    check_compiled(*made(name), "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="no C++ compiler")
@torch.no_grad()
def test_compiled_by_a_real_compiler_agrees() -> None:
    check_compiled(*small(), "inductor")


def check_compiled(bayes: dubito.BayesianModule, x: Any, backend: str) -> None:
    run = compiled(bayes, x, backend=backend)
    for batch in (x, doubled(x)):
        eager, fast = propagated(bayes, batch), run.moments(batch)
        torch.testing.assert_close(fast.mean, eager.mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fast.variance, eager.variance, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(run(x).probs, bayes.propagate(x).probs, atol=1e-5, rtol=1e-5)
    bayes.rescale_spread_(0.5)
    run.refresh()
    torch.testing.assert_close(run.moments(x).variance, propagated(bayes, x).variance, atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_a_network_that_cannot_be_exported_is_traced_and_runs_eagerly() -> None:
    bayes, x = made("vilt")
    said = report(bayes, x)
    assert said.source == "trace"
    assert "torch.export failed" in str(said)
    assert said.complete
    with pytest.warns(dubito.DubitoWarning, match="cannot be compiled whole"):
        run = compiled(bayes, x, backend="eager")
    torch.testing.assert_close(run.moments(x).mean, propagated(bayes, x).mean)


@pytest.mark.parametrize("rules", ["cvp", "cvp-paper", "streamlining"])
@torch.no_grad()
def test_rule_sets(rules: str) -> None:
    """Streamlining's mean is the mean network's; the others shift it."""
    bayes, x = made("vit", sd=0.2)
    mean_network = bayes.eval()(x).logits
    predictive = bayes.propagate(x, rules=rules)
    assert predictive.logits_mean is not None
    gap = float((predictive.logits_mean - mean_network).abs().max())
    assert gap < 1e-5 if rules == "streamlining" else gap > 1e-2
    assert float(predictive.logits_variance.min()) > 0


def test_networks_are_left_as_they_were() -> None:
    bayes, x = made("resnet_by_hand")
    before = copy.deepcopy(bayes.state_dict())
    bayes.propagate(x)
    assert all(torch.equal(value, before[name]) for name, value in bayes.state_dict().items())
