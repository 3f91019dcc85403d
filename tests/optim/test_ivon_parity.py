"""The update against the authors' package, on the same noise. The package is the extra `bench`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito.optim.ivon
from dubito import IVON

theirs = pytest.importorskip("ivon")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(("draws", "clip"), [(1, float("inf")), (3, float("inf")), (1, 0.02)])
@pytest.mark.parametrize("rescale", [True, False])
def test_the_update_is_theirs(
    monkeypatch: pytest.MonkeyPatch, draws: int, clip: float, rescale: bool
) -> None:
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))
    settings: dict[str, Any] = {"lr": 0.2, "ess": 40, "hess_init": 0.6, "weight_decay": 0.02}
    settings |= {"clip_radius": clip, "rescale_lr": rescale}
    net = network()
    reference = theirs.IVON(net.parameters(), beta1=0.9, beta2=0.95, **settings)
    noise: list[Tensor] = []
    trace = []
    for _ in range(15):
        for _ in range(draws):
            means = [p.detach().clone() for p in net.parameters()]
            scale = (settings["ess"] * (reference.param_groups[0]["hess"] + settings["weight_decay"])).sqrt()
            pieces = scale.split([p.numel() for p in means])
            with reference.sampled_params(train=True):
                reference.zero_grad()
                for p, m, s in zip(net.parameters(), means, pieces, strict=True):
                    noise.append((p.detach() - m) * s.view_as(m))
                F.cross_entropy(net(x), y).backward()
        reference.step()
        trace.append(
            torch.cat(
                [*(p.detach().reshape(-1) for p in net.parameters()), reference.param_groups[0]["hess"]]
            )
        )

    class Replayed:
        def __init__(self, *numbers: int) -> None:
            pass

        def like(self, tensor: Tensor) -> Tensor:
            return noise.pop(0).clone()

    monkeypatch.setattr(dubito.optim.ivon, "NoiseSource", Replayed)
    net = network()
    ours = IVON(net.parameters(), betas=(0.9, 0.95), **settings)
    for expected in trace:
        ours.zero_grad()
        for _ in range(draws):
            with ours.sampled_params():
                F.cross_entropy(net(x), y).backward()
        ours.step()
        parts = [p.detach() for p in net.parameters()] + [ours.state[p]["hessian"] for p in net.parameters()]
        torch.testing.assert_close(torch.cat([t.reshape(-1) for t in parts]), expected, rtol=1e-6, atol=1e-6)
    assert not noise
