"""One pass with means and variances against draws of the weights, on networks that nobody changed for it.

Run `python benchmarks/propagation_table.py [--only NAME …] [--draws 400] [--norms] [--json FILE] [--write PAGE]`. For
each network of `propagation_networks.py`: which operators have an exact rule, an approximation or none
(`dubito.moments.report`), and for each rule set, over all inputs and outputs,

- variance ratio: the propagated variance over that of the draws, median and the 10 and 90 % quantiles;
- R² of the mean shift: of the draws' mean less the output at the mean weights, how much the propagated mean explains
  (0: nothing, as by the output at the mean weights itself), the draws' own noise taken out; "-" where the shift is
  smaller than that noise;
- correlation of the logarithms of both variances.

The posterior is mean field: each weight's standard deviation is a stated fraction of the root mean square of its
tensor (a tensor of zeros stays certain). A network whose package or file is not here is left out, which is said.
`--norms` measures the rules of normalisation and attention one by one instead (`propagation_rules.py`). `--json` keeps
the rows of networks that were not run this time; `--write` puts the table between the page's two marks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

import dubito
from dubito.moments import Context, propagated, report, rule_set
from propagation_networks import NETWORKS, MissingError, Network, made
from propagation_rules import rules_table

RULES = ("cvp", "cvp-paper", "streamlining")
DRAWN_AT_ONCE = 10_000_000  # weights
HEADINGS = ("network", "weights", "sd", "exact / approx. / none", "rules", "variance ratio (10–90 %)")
HEADINGS += ("R² of mean shift", "corr. of log var.")


@dataclass(frozen=True)
class Row:
    """One network under one rule set."""

    network: str
    weights: int
    fraction: float
    coverage: tuple[int, int, int]
    rules: str
    ratio: float
    low: float
    high: float
    shift: float | None
    correlation: float
    draws: int


def posterior(network: Network, fraction: float | None = None) -> dubito.BayesianModule:
    """Mean field, each tensor's standard deviation a fraction of its root mean square."""
    fraction = network.fraction if fraction is None else fraction
    variances: dict[Any, Tensor | float] = {
        name: fraction**2 * float(p.detach().square().mean()) for name, p in network.module.named_parameters()
    }
    return dubito.from_variances(network.module, variances, dubito.Categorical()).eval()


@torch.no_grad()
def moments_of_draws(
    bayes: dubito.BayesianModule, x: Any, draws: int, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Mean and variance over draws, in float64; few are in memory at a time."""
    count = sum(slot.shape.numel() for slot in bayes._slots.values())
    at_once = max(1, min(draws, DRAWN_AT_ONCE // count))
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, draws, at_once):
        kept = bayes.draw(min(at_once, draws - start), generator)
        parts.append(bayes.outputs(x, draws=kept).double())
    outputs = torch.cat(parts)
    return outputs.mean(0), outputs.var(0)


def compared(
    mean: Tensor, variance: Tensor, drawn: tuple[Tensor, Tensor], at_mean: Tensor, draws: int
) -> dict[str, Any]:
    """The figures of one row."""
    ratio = (variance.double() / drawn[1]).flatten()
    low, middle, high = ratio.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=ratio.dtype)).tolist()
    noise = float(drawn[1].sum()) / draws
    shift = drawn[0] - at_mean.double()
    total = float(shift.square().sum()) - noise
    left = float((drawn[0] - mean.double()).square().sum()) - noise
    logs = torch.stack([variance.double().log().flatten(), drawn[1].log().flatten()])
    return {
        "ratio": middle,
        "low": low,
        "high": high,
        "shift": 1.0 - left / total if total > noise else None,
        "correlation": float(logs.corrcoef()[0, 1]),
    }


@torch.no_grad()
def rows_of(name: str, draws: int, fraction: float | None = None) -> tuple[str, list[Row]]:
    """The coverage report in words, and the rows of one network.

    Raises:
        MissingError: where its package or file is not here.
    """
    network = made(name)
    bayes = posterior(network, fraction)
    said = report(bayes, network.x)
    coverage = tuple(sum(u.exactness == e for u in said.uses) for e in ("exact", "approximate", "none"))
    drawn = moments_of_draws(bayes, network.x, draws)
    at_mean = bayes.select(bayes(**network.x) if isinstance(network.x, Mapping) else bayes(network.x))
    count = sum(slot.shape.numel() for slot in bayes._slots.values())
    rows = []
    for rules in RULES:
        found = propagated(bayes, network.x, Context(rule_set(rules)))
        figures = compared(found.mean, found.variance, drawn, at_mean, draws)
        used = network.fraction if fraction is None else fraction
        rows.append(Row(name, count, used, coverage, rules, draws=draws, **figures))  # type: ignore[arg-type]
    return str(said), rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table; what a network has in common is said once."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|---:|---:|---|---|---|---:|---:|"]
    last = ""
    for row in rows:
        common = (row.network, f"{row.weights:,}", f"{row.fraction:g}", " / ".join(map(str, row.coverage)))
        shift = (
            "-" if row.shift is None or not math.isfinite(row.shift) else f"{round(row.shift, 2) + 0.0:.2f}"
        )
        own = (
            f"`{row.rules}`",
            f"{row.ratio:.2f} ({row.low:.2f}–{row.high:.2f})",
            shift,
            f"{row.correlation:.2f}",
        )
        shown = common if row.network != last else ("", "", "", "")
        lines.append("| " + " | ".join((*shown, *own)) + " |")
        last = row.network
    names: dict[int, list[str]] = {}
    for row in rows:
        if row.network not in names.setdefault(row.draws, []):
            names[row.draws].append(row.network)
    said = "; ".join(f"{draws} for {', '.join(found)}" for draws, found in sorted(names.items()))
    return "\n".join(lines) + f"\n\nDraws of the weights: {said}."


def write_block(page: Path, mark: str, text: str) -> None:
    """Put text between `<!-- mark -->` and `<!-- /mark -->`.

    Raises:
        ValueError: where the page does not have both marks.
    """
    old = page.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{page} has no lines <!-- {mark} --> and <!-- /{mark} --> to write between")
    page.write_text(pattern.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old), encoding="utf-8")


def kept_rows(path: Path | None) -> dict[str, list[Row]]:
    """Rows written by an earlier run, by network."""
    found: dict[str, list[Row]] = {}
    if path is not None and path.exists():
        for values in json.loads(path.read_text(encoding="utf-8")):
            row = Row(**{**values, "coverage": tuple(values["coverage"])})
            found.setdefault(row.network, []).append(row)
    return found


def options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument(
        "--fraction", type=float, help="of each tensor's scale, in place of the networks' own"
    )
    parser.add_argument("--norms", action="store_true", help="the rules of normalisation and attention")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--quiet", action="store_true", help="no coverage reports")
    found = parser.parse_args(argv)
    if found.draws < 2:
        parser.error("--draws must be at least 2: a variance is wanted")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    chosen = options(argv)
    if chosen.norms:
        try:
            text = rules_table(posterior, chosen.draws)
        except MissingError as error:
            print(f"the rules are measured on MiniLM, which is not here: {error}")
            return 1
        print(text)
        if chosen.write:
            write_block(chosen.write, "rules", text)
        return 0
    rows = kept_rows(chosen.json)
    for name in chosen.only:
        try:
            said, rows[name] = rows_of(name, chosen.draws, chosen.fraction)
        except MissingError as error:
            print(f"{name}: left out, it is not here ({error})")
            continue
        print(f"{name}: {said.splitlines()[0] if chosen.quiet else said}", flush=True)
        if chosen.json:
            found = [asdict(r) for n in NETWORKS for r in rows.get(n, ())]
            chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table([r for n in NETWORKS for r in rows.get(n, ())])
    print(f"\n{text}")
    if chosen.write:
        write_block(chosen.write, "networks", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
