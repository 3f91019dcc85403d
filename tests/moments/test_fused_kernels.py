"""The switch to compiled kernels: what they return is what the eager ones do."""

from collections.abc import Iterator

import pytest
import torch

from dubito.moments import activation_moments as rules
from dubito.moments import elementwise as machinery
from dubito.moments.elementwise import compiler_found, fused, is_fused


@pytest.fixture(autouse=True)
def eager_again() -> Iterator[None]:
    yield
    fused(False)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randn(3, 5, 7, generator=generator), torch.rand(3, 5, 7, generator=generator)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["relu", "gelu", "sigmoid", "hardtanh"])
def test_compiled_equals_eager(backend: str, name: str) -> None:
    rule = getattr(rules, f"{name}_moments")
    mean, variance = inputs()
    expected = rule(mean, variance)
    with fused(backend=backend):
        for size in (3, 2):  # one graph serves both
            out = rule(mean[:size].transpose(0, 1), variance[:size].transpose(0, 1))
            for made, wanted in zip(out, expected, strict=True):
                torch.testing.assert_close(made, wanted[:size].transpose(0, 1), rtol=1e-5, atol=1e-6)
        single = rule(mean[:1, :1, :1], variance[:1, :1, :1])
    torch.testing.assert_close(single[1], expected[1][:1, :1, :1])


def test_gradients_pass_through_compiled_kernels() -> None:
    mean, variance = (t.requires_grad_() for t in inputs())
    eager = torch.autograd.grad(rules.gelu_moments(mean, variance)[1].sum(), (mean, variance))
    with fused(backend="aot_eager"):
        out = torch.autograd.grad(rules.gelu_moments(mean, variance)[1].sum(), (mean, variance))
    torch.testing.assert_close(out, eager, rtol=1e-4, atol=1e-5)


def test_half_precision_and_tensor_options_keep_working() -> None:
    mean, variance = inputs()
    with fused(backend="eager"):
        half = rules.relu_moments(mean.bfloat16(), variance.bfloat16())
        slopes = rules.leaky_relu_moments(mean, variance, torch.full((7,), 0.1))
    assert half[0].dtype == torch.bfloat16
    torch.testing.assert_close(slopes, rules.leaky_relu_moments(mean, variance, 0.1))


def test_the_switch_holds_until_undone_and_a_block_restores_it() -> None:
    assert not is_fused()
    fused(True, backend="eager")
    with fused(False):
        assert not is_fused()
    assert is_fused()
    fused(False)
    assert not is_fused()


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machinery, "compiler_found", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        fused(True)
    assert not is_fused()


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(), reason="no C++ compiler")
def test_the_real_compiler() -> None:
    mean, variance = inputs()
    expected = rules.gelu_moments(mean, variance)
    with fused():
        out = rules.gelu_moments(mean, variance)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
