"""Processes with attention: consistent where that is promised, and not where it is not."""

import pytest
import torch

import dubito
from dubito.amortised.attention import AttentionProcess
from dubito.amortised.fitting import fit_process
from dubito.amortised.generators import SineTasks
from dubito.amortised.objectives import npvi, pp_avi


def made(**options: object) -> AttentionProcess:
    torch.manual_seed(0)
    settings = {"width": 8, "heads": 2, "likelihood": dubito.Gaussian(0.2), **options}
    return AttentionProcess(1, 1, **settings).double()  # type: ignore[arg-type]


def data(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.sin(2 * x)


def test_predictions_do_not_depend_on_what_else_is_asked_unless_published_attention_is_chosen() -> None:
    x, y = data(6)
    at = torch.linspace(-2, 2, 9, dtype=torch.float64).unsqueeze(-1)
    consistent = made(blocks=2).condition(x, y, samples=3)
    torch.testing.assert_close(consistent.sample_functions(at)[:, ::4], consistent.sample_functions(at[::4]))
    published = made(target_attention="targets").condition(x, y, samples=3)
    assert (
        float((published.sample_functions(at)[:, ::4] - published.sample_functions(at[::4])).abs().max())
        > 1e-3
    )


def test_the_order_of_the_context_and_padding_do_not_matter() -> None:
    process = made()
    x, y = data(6)
    noise = process.noise(3, 1, torch.Generator().manual_seed(0))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    first = process.infer(process.gather([(x, y)]), noise=noise)
    turned = process.infer(process.gather([(x[order], y[order])]), noise=noise)
    padded = process.infer(
        process.gather([(x, y), data(11)]), noise=tuple(torch.cat((n, n), 1) for n in noise)
    )
    at = torch.linspace(-2, 2, 5, dtype=torch.float64).reshape(1, -1, 1)
    expected = process.outputs(first.weights, at)
    torch.testing.assert_close(process.outputs(turned.weights, at), expected)
    torch.testing.assert_close(turned.kl, first.kl)
    both = process.outputs(padded.weights, at.expand(2, -1, 1))
    torch.testing.assert_close(both[:, :1], expected)


def test_the_context_is_seen_through_the_same_function_as_targets() -> None:
    process = made()
    x, y = data(6)
    batch = process.gather([(x, y)])
    drawn = process.infer(batch, 3)
    again = process.outputs(drawn.weights, batch.x)
    layers = drawn.weights[: len(process.layers)]
    assert again.shape == (3, 1, 6, 1)
    assert len(layers) == 8
    assert float(drawn.kl.detach().min()) > 0


def test_without_data_it_is_the_prior() -> None:
    process = made()
    at = torch.linspace(-2, 2, 5).unsqueeze(-1)
    assert process.sample_functions(at, 4).shape == (4, 5, 1)
    drawn = process.infer(process.gather([(torch.zeros(0, 1), torch.zeros(0, 1))]), 3)
    torch.testing.assert_close(drawn.kl, torch.zeros_like(drawn.kl), atol=1e-9, rtol=0)


def test_it_trains() -> None:
    process = made()
    result = fit_process(process, SineTasks(points=(6, 12)), steps=40, samples=2, tasks_per_step=3)
    assert sum(result.losses[-8:]) < sum(result.losses[:8])
    x, y = data(8)
    context, target = process.gather([(x[:4], y[:4])]), process.gather([(x[4:], y[4:])])
    pp_avi(process, context, target, 2).loss.backward()
    assert all(p.grad is not None for p in process.parameters() if p.requires_grad)


def test_what_it_does_not_offer_it_says() -> None:
    process = made()
    x, y = data(8)
    with pytest.raises(ValueError, match="attend to each other"):
        process.condition(x, y, batch_size=3)
    context, target = process.gather([(x[:4], y[:4])]), process.gather([(x[4:], y[4:])])
    with pytest.raises(dubito.CapabilityError, match="npvi"):
        npvi(process, context, target)
    for ask in (process.network, process.weight_prior, lambda: process.condition(x, y).update(x, y)):
        with pytest.raises(dubito.CapabilityError):
            ask()
    for options, said in (
        ({"heads": 3}, "heads=3"),
        ({"blocks": 0}, "blocks=0"),
        ({"target_attention": "all"}, "target_attention"),
        ({"activation": "sine"}, "activation"),
    ):
        with pytest.raises(ValueError, match=said):
            made(**options)
