"""A calibration of propagated variances: factors at the sites where propagation is known to be wrong.

A site is a place before an activation, before a normalisation, or the output: there a factor alpha multiplies the
variance. At pooling and attention a correlation rho says how much of the summed entries' noise is shared (a weight's
noise is the same at every position, which independence misses). Sites are module paths, so a calibration is a small
table that can be saved beside the model. `calibration_fitting.calibrate` finds one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dubito.moments.moments import Moments
from dubito.moments.rule_sets import RuleSet

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

FORMAT = 1


class CalibrationError(ValueError):
    """A calibration that was fitted for something else, or a file that holds none."""


@dataclass(frozen=True)
class Calibration:
    """Factors by site; made by `calibrate`, given to `bayes.propagate(x, calibration=…)`.

    Attributes:
        alphas: factor on the variance, by site.
        rhos: correlation in [0, 1], by pooling or attention site.
        temperature: what the output's mean is divided by (classification; its variance by the square).
        rules: name of the rule set it was fitted under.
        fingerprint: of the network's parameters' names and shapes.
        method: how it was found.
        history: losses of the fit by NLL, first and last.
    """

    alphas: Mapping[str, float]
    rhos: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    rules: str = "cvp"
    fingerprint: str = ""
    method: str = ""
    history: tuple[float, ...] = ()

    def alpha(self, site: str) -> float | None:
        """The factor on the variance at a site; None is 1."""
        return self.alphas.get(site)

    def rho(self, site: str) -> float | None:
        """The correlation at a site; None is independence."""
        return self.rhos.get(site)

    def finish(self, moments: Moments) -> Moments:
        """The output's moments at the temperature."""
        if self.temperature == 1.0:
            return moments
        return Moments(moments.mean / self.temperature, moments.variance / self.temperature**2)

    def check(self, bayes: BayesianModule, rules: RuleSet) -> None:
        """Refuse a network or a rule set that this was not fitted for.

        Raises:
            CalibrationError: saying which.
        """
        if self.fingerprint and self.fingerprint != fingerprint(bayes):
            raise CalibrationError(
                "this calibration was fitted for a network whose parameters have other names or shapes; fit one for "
                "this network: dubito.moments.calibrate(bayes, validation)"
            )
        if self.rules != rules.name:
            raise CalibrationError(
                f"this calibration was fitted under rules={self.rules!r}, but the propagation uses {rules.name!r}: "
                f"pass rules={self.rules!r}, or fit one for {rules.name!r}"
            )

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a file that stands there is replaced at once or not at all."""
        path = Path(path)
        values = {"format": FORMAT, **{n: _plain(v) for n, v in vars(self).items()}}
        temporary = path.with_name(f".{path.name}.part")
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            CalibrationError: a file that is no calibration, of a newer format, or with impossible values.
        """
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") > FORMAT:
                raise CalibrationError(
                    f"{path}: written by a newer version of dubito; update it to read this file"
                )
            made = cls(**{**values, "history": tuple(values["history"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"{path}: not a calibration saved by dubito ({error})") from error
        numbers = [*made.alphas.values(), made.temperature]
        if not all(math.isfinite(v) and v > 0 for v in numbers) or not all(
            0 <= r <= 1 for r in made.rhos.values()
        ):
            raise CalibrationError(f"{path}: alphas and the temperature must be positive, rhos within [0, 1]")
        return made


def fingerprint(bayes: BayesianModule) -> str:
    """A hash of the random parameters' names and shapes, which is what sites depend on."""
    slots = sorted((name, tuple(slot.shape)) for name, slot in bayes._slots.items())
    return hashlib.sha256(repr((type(bayes.module).__name__, slots)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: float(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
