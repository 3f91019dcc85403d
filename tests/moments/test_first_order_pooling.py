"""Max pooling in the first-order rule set: the mean network's own maximum, with that entry's variance."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dubito
from dubito.moments import Context, Moments, propagated, rule_set
from dubito.moments.registry import apply

CASES = [
    (F.max_pool1d, (2, 3, 9), (3, 2, 1)),
    (F.max_pool2d, (2, 3, 8, 6), (2,)),
    (F.max_pool3d, (2, 3, 4, 4, 4), (2,)),
    (F.adaptive_max_pool2d, (2, 3, 8, 6), (2,)),
]


@pytest.mark.parametrize(("function", "shape", "args"), CASES)
def test_variance_is_that_of_the_largest_mean(
    function: object, shape: tuple[int, ...], args: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator)
    variance = mean.exp()  # so that the entry's variance can be told from its mean
    context = Context(rule_set("streamlining"))
    found = apply(context, function, (Moments(mean, variance), *args), {})
    torch.testing.assert_close(found.mean, function(mean, *args))  # type: ignore[operator]
    torch.testing.assert_close(found.variance, found.mean.exp())


@torch.no_grad()
def test_the_mean_is_the_mean_networks() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    bayes = dubito.bayesianize(network, dubito.MeanField(scale=0.2), likelihood=dubito.Categorical()).eval()
    x = torch.randn(4, 1, 10, 10)
    first_order = propagated(bayes, x, Context(rule_set("streamlining")))
    torch.testing.assert_close(first_order.mean, bayes(x), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(propagated(bayes, x).mean, bayes(x), atol=1e-3)
    assert dubito.moments.report(bayes, x, "streamlining").complete
