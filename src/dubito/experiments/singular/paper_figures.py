"""The paper's printed figures, which stand under ours in the tables: other data, other sizes.

The means and standard deviations are over five seeds (MIMIC-III) and four (Beijing, SST-2). Its parameter counts
for Beijing contradict each other (33K, 66K, 132K and 330K cannot belong to one network, which has 53,569 weights) and
its MPIW and coverage are given for SWAG alone or not of nominal level; they are printed as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def parsed(text: str) -> Mapping[str, Mapping[str, str]]:
    """By method, by metric: from lines of cells parted by bars, the first line the metrics' names."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    names = lines[0][1:]
    return MappingProxyType({line[0]: dict(zip(names, line[1:], strict=True)) for line in lines[1:]})


MIMIC = parsed(
    """
    method        | auroc       | aupr_err    | ood_auroc   | aupr_out    | aupr_in     | nll         | ece  | stored | seconds
    deterministic | .922 ± .003 | .145 ± .035 | .500        | .544        | .456        | .284 ± .017 | –    | 22.4k  | 53
    ensemble      | .929 ± .002 | .237 ± .035 | .738 ± .061 | .754 ± .048 | .721 ± .053 | .300 ± .021 | –    | 112k   | 221
    mean-field    | .895 ± .004 | .412 ± .029 | .770 ± .051 | .759 ± .055 | .807 ± .035 | .401 ± .033 | –    | 44.8k  | 502
    low-rank      | .895 ± .001 | .540 ± .027 | .802 ± .018 | .788 ± .034 | .824 ± .013 | .433 ± .020 | –    | 13.6k  | 532
    low-rank-svd  | .898 ± .001 | .486 ± .155 | .713 ± .069 | .719 ± .046 | .738 ± .074 | .452 ± .035 | –    | 13.6k  | 524
    rank-one      | .901 ± .010 | .322 ± .019 | .705 ± .073 | .742 ± .062 | .663 ± .080 | .317 ± .024 | –    | 23.3k  | 503
    swag          | .922 ± .001 | –           | .634 ± .047 | .680        | –           | .359 ± .002 | .190 | 470k   | 105
    """  # noqa: E501
)

BEIJING = parsed(
    """
    method        | mae         | rmse  | picp        | mpiw | ood_auroc   | aupr_out    | mae_90 | mae_80 | stored
    deterministic | 10.79 ± .16 | –     | –           | –    | .500        | .500        | –      | –      | 33K
    ensemble      | 10.45 ± .03 | –     | .310 ± .021 | –    | .730 ± .029 | .883 ± .012 | 9.45   | 9.21   | 330K
    mean-field    | 10.55 ± .11 | –     | .788 ± .012 | –    | .492 ± .039 | .743 ± .019 | 9.46   | 8.82   | 132K
    low-rank      | 10.63 ± .20 | –     | .790 ± .006 | –    | .710 ± .021 | .861 ± .022 | 9.43   | 8.71   | 47K
    low-rank-svd  | 10.70 ± .03 | –     | .773 ± .022 | –    | .687 ± .068 | .812 ± .026 | 9.50   | 9.06   | 47K
    rank-one      | 10.80 ± .15 | –     | .449 ± .025 | –    | .580 ± .046 | .751 ± .028 | 9.45   | 9.42   | 66K
    swag          | 10.54       | 17.31 | .973        | 87.0 | .585 ± .054 | .783        | –      | –      | 1.18M
    """
)

SST2 = parsed(
    """
    method        | accuracy    | nll         | ood_auroc   | mi_ratio | aupr_in     | aupr_succ | stored | minutes
    deterministic | .812 ± .006 | .490        | .500        | 0        | .102        | .812      | 9.9M   | 7.7
    ensemble      | .825 ± .006 | .434 ± .023 | .657 ± .009 | 1.55     | .267 ± .016 | .933      | 49.6M  | 64.7
    mean-field    | .752 ± .011 | .552 ± .010 | .622 ± .019 | 1.31     | .222 ± .028 | .888      | 19.8M  | 23.1
    low-rank      | .806 ± .003 | .527 ± .006 | .640 ± .028 | 1.35     | .302 ± .027 | .917      | 1.5M   | 8.2
    low-rank-svd  | .800        | .516        | .616 ± .011 | 1.22     | .272        | .923      | 1.5M   | 8.0
    rank-one      | .795        | .507        | .613 ± .015 | 1.11     | .271        | .931      | 10.0M  | 12.5
    swag          | .808        | .556        | .613        | 1.24     | –           | –         | 208M   | 26.6
    """
)
