"""A linear layer whose weights' posterior is amortised: Bayesian linear regression on pseudo-observations.

Each unit's weights have the Gaussian prior N(μ, Σ) over D inputs (the bias is the last one, whose input is 1). Given
features φ_n, pseudo-observations v_n and their precisions λ_n the posterior is exact:

    P = Σ⁻¹ + Σ_n λ_n φ_n φ_nᵀ        P·m = Σ⁻¹μ + Σ_n λ_n v_n φ_n

Both are sums over data, so data may come in batches, in any order. Without data it is the prior.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dubito.amortised.inference_networks import PseudoObservations
from dubito.amortised.layer_priors import PriorKind, layer_prior
from dubito.gaussian_conditionals import LayerGaussian, as_one_block, data_term, from_natural

NaturalTerms = tuple[Tensor, Tensor]


class AmortisedLinear(nn.Module):
    """Random weights (units, inputs + 1) with a learned Gaussian prior.

    Args:
        inputs: features, without the constant.
        units: outputs.
        prior: shape of the prior, see `dubito.amortised.layer_priors`.
        prior_rank: rank of a "low-rank" prior.
        name: of the layer, for errors.
    """

    def __init__(
        self, inputs: int, units: int, prior: PriorKind = "unit", prior_rank: int = 4, name: str = "the layer"
    ) -> None:
        super().__init__()
        self.inputs, self.units, self.name = inputs, units, name
        self.prior = layer_prior(prior, units, inputs + 1, prior_rank)

    @property
    def blocks(self) -> tuple[int, int]:
        """(K, M): independent blocks of weights and entries a block."""
        return self.prior.blocks

    def noise(self, samples: int, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        """Standard normals for draws of the posterior, (S, tasks, K, M)."""
        return torch.randn(
            samples,
            tasks,
            *self.blocks,
            generator=generator,
            dtype=torch.float64,
            device=self.prior.mean.free.device,
        )

    def terms(self, features: Tensor, observations: PseudoObservations) -> NaturalTerms:
        """What data add to the precision and the shift.

        Args:
            features: (S, tasks, points, inputs + 1), the constant last; S may be 1.
            observations: values and precisions, (tasks, points, units); precision 0 is no observation.

        Returns:
            (S, tasks, K, M, M) and (S, tasks, K, M).
        """
        assert observations.values is not None
        precision, shift = data_term(features, observations.values, observations.precisions)
        return (precision, shift) if self.blocks[0] == self.units else as_one_block(precision, shift)

    def conditional(self, prior: LayerGaussian, terms: NaturalTerms | None) -> LayerGaussian:
        """The posterior, from the prior as it stands and what data add.

        Raises:
            PrecisionError: if its precision is not positive definite.
        """
        precision, shift = prior.precision, prior.shift
        if terms is not None:
            precision, shift = precision + terms[0], shift + terms[1]
        else:
            precision, shift = precision[None, None], shift[None, None]
        return self.conditional_of((precision, shift))

    def conditional_of(self, terms: NaturalTerms) -> LayerGaussian:
        """The Gaussian of these natural parameters, prior and data together."""
        return from_natural(*terms, self.name)

    def shaped(self, blocks: Tensor) -> Tensor:
        """(…, K, M) as weights (…, units, inputs + 1)."""
        return blocks.reshape(*blocks.shape[:-2], self.units, self.inputs + 1)

    def flat(self, weights: Tensor) -> Tensor:
        """The inverse of `shaped`."""
        return weights.reshape(*weights.shape[:-2], *self.blocks)


def with_constant(values: Tensor) -> Tensor:
    """The constant 1 appended to the last dimension."""
    return torch.cat((values, values.new_ones(*values.shape[:-1], 1)), dim=-1)


def accumulated(total: NaturalTerms | None, terms: NaturalTerms) -> NaturalTerms:
    """Sum of natural terms."""
    return terms if total is None else (total[0] + terms[0], total[1] + terms[1])
