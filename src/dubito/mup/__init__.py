"""How initial scales and learning rates change with width: maximal update, standard and neural-tangent.

Under the maximal update parametrisation (Yang & Hu 2021; Yang et al. 2022, "Tensor Programs V", table 3) every layer
learns at any width, and the best learning rate of a narrow network is that of a wide one. For variational weights the
same holds of the means, and the factors of the covariance follow their means, slower by their rank.

    dubito.mup.initialize_(bayes)
    optimizer = torch.optim.SGD(dubito.mup.parameter_groups(bayes, lr=0.1), momentum=0.9)

All of it works on plain modules too, for the deterministic baseline.
"""

from dubito.mup.groups import parameter_groups
from dubito.mup.initialization import initialize_
from dubito.mup.roles import Role, roles
from dubito.mup.scales import Parametrization, Scale, scales

__all__ = ["Parametrization", "Role", "Scale", "initialize_", "parameter_groups", "roles", "scales"]
