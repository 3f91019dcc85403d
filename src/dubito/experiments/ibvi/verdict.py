"""From rows to tables, targets and words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dubito.experiments.ibvi.comparison import (
    FULL,
    ComparisonSettings,
    Overhead,
    compare_ibvi,
    overhead,
)
from dubito.experiments.ibvi.contestants import CONTESTANTS, NETWORKS
from dubito.experiments.ibvi.processes import cores
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.plots import grouped_bars
from dubito.report import Picture, Row, Table

FOLDER = Path("runs/ibvi")
PROCESSES = 2  # at most: each holds the images of a data set
STEP_GOAL, MEMORY_GOAL, ERROR_GOAL = 1.15, 0.12, 0.003
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
_COLUMNS = (
    ("error", "error %", 100.0, 2),
    ("nll", "NLL", 1.0, 3),
    ("ece", "ECE %", 100.0, 2),
    ("ood_auroc", "OOD AUROC", 1.0, 3),
    ("corrupted_error", "corr. error %", 100.0, 1),
    ("corrupted_nll", "corr. NLL", 1.0, 2),
    ("corrupted_ece", "corr. ECE %", 100.0, 1),
)
_DRAWN = ("plain", "temperature", "laplace-ml", "ensemble", "ibvi", "ibvi-last-two")  # as many as colours
Values = Mapping[str, Any]


def averaged(rows: Sequence[Values]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Metrics, training seconds and stored numbers by data set, network and method: means over seeds."""
    grouped: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for row in rows:
        key = (row["key"]["data"], row["key"]["network"], row["key"]["method"])
        more = {"train_seconds": row["train_seconds"], "stored_numbers": row["stored_numbers"]}
        grouped.setdefault(key, []).append({**row["metrics"], **more})
    return {
        key: {name: statistics.fmean(one[name] for one in found) for name in found[0]}
        for key, found in grouped.items()
    }


def tables(rows: Sequence[Values]) -> tuple[Table, ...]:
    """One table a data set and network, a row a method; time and memory in units of the plain network's."""
    found = averaged(rows)
    result = []
    for data, network in dict.fromkeys((d, n) for d, n, _ in found):
        base = found.get((data, network, "plain"))
        lines = []
        for method, (title, _) in CONTESTANTS.items():
            m = found.get((data, network, method))
            if m is None:
                continue
            cells = [f"{scale * m[name]:.{digits}f}" for name, _, scale, digits in _COLUMNS]
            for name in ("train_seconds", "stored_numbers"):
                cells.append(f"{m[name] / base[name]:.2f}×" if base is not None else "–")
            lines.append(Row(title, tuple(cells)))
        columns = (*(title for _, title, _, _ in _COLUMNS), "time", "memory")
        result.append(Table(columns, tuple(lines), f"{_TITLES.get(data, data)}, {NETWORKS[network].title}"))
    return tuple(result)


def targets(rows: Sequence[Values], costs: Mapping[str, Overhead]) -> dict[str, bool]:
    """What was to be shown of first+last, in words, and whether it was."""
    found = averaged(rows)
    result: dict[str, bool] = {}
    for data, network in dict.fromkeys((d, n) for d, n, _ in found):
        ours, base = found.get((data, network, "ibvi")), found.get((data, network, "plain"))
        if ours is None or base is None:
            continue
        where = f"{_TITLES.get(data, data)}, {NETWORKS[network].title}"
        gap = ours["error"] - base["error"]
        result[f"{where}: error within 0.3 points of plain ({100 * gap:+.2f})"] = gap <= ERROR_GOAL
        for name, title in (
            ("nll", "NLL"),
            ("ece", "ECE"),
            ("corrupted_nll", "corrupted NLL"),
            ("corrupted_ece", "corrupted ECE"),
        ):
            words = f"{where}: {title} better than plain ({ours[name]:.3f} against {base[name]:.3f})"
            result[words] = ours[name] < base[name]
    result |= _against_ensemble(found)
    if "ibvi" in costs:
        cost = costs["ibvi"]
        result[f"small ResNet: training step ≤ {STEP_GOAL}× plain ({cost.step_ratio:.2f}×)"] = (
            cost.step_ratio <= STEP_GOAL
        )
        result[f"small ResNet: added memory ≤ 12 % ({100 * cost.added_memory:.1f} %)"] = (
            cost.added_memory <= MEMORY_GOAL
        )
    return result


def _against_ensemble(found: Mapping[tuple[str, str, str], Mapping[str, float]]) -> dict[str, bool]:
    """ECE under corruption no worse than the ensemble's on at least one data set (the mean over networks)."""
    gaps: dict[str, list[float]] = {}
    for data, network, method in found:
        other = found.get((data, network, "ensemble"))
        if method == "ibvi" and other is not None:
            gaps.setdefault(data, []).append(
                found[data, network, method]["corrupted_ece"] - other["corrupted_ece"]
            )
    if not gaps:
        return {}
    said = ", ".join(f"{_TITLES.get(d, d)} {100 * statistics.fmean(g):+.1f} points" for d, g in gaps.items())
    words = f"ECE out of distribution no worse than the ensemble's on at least one data set ({said})"
    return {words: any(statistics.fmean(g) <= 0 for g in gaps.values())}


def picture(rows: Sequence[Values], network: str) -> Picture:
    """ECE of six of the methods in and out of distribution, one data set after the other."""
    found = averaged(rows)
    data = list(dict.fromkeys(d for d, n, _ in found if n == network))
    bars: dict[str, dict[str, float]] = {}
    for method in _DRAWN:
        if all((d, network, method) in found for d in data):
            bars[CONTESTANTS[method][0]] = {
                f"{_TITLES.get(d, d).removesuffix('-MNIST')} {kind}": 100 * found[d, network, method][name]
                for d in data
                for kind, name in (("test", "ece"), ("corr.", "corrupted_ece"))
            }
    title = f"Calibration error of the {NETWORKS[network].title}"
    return Picture(grouped_bars(bars, "ECE (%)"), f"Bars of {title} by method.", title)


def comparison_part(job: PartJob) -> Outcome:
    """The part `comparison` of the reproduction."""
    base = FULL if job.full else ComparisonSettings()
    settings = ComparisonSettings(**{**vars(base), "seeds": job.seeds})
    folder = FOLDER / ("full" if job.full else "default")
    processes = max(1, min(PROCESSES, cores() // torch.get_num_threads()))
    job.say(f"    finished rows are kept in {folder} and taken up again; {processes} at once")
    rows = compare_ibvi(settings, folder, job.say, processes)
    resnet = NETWORKS["resnet"]
    costs = {"ibvi": overhead(resnet, resnet.first_last), "ibvi-last-two": overhead(resnet, resnet.last_two)}
    epochs = " and ".join(f"{settings.epochs[n]} ({NETWORKS[n].title})" for n in settings.networks)
    sizes = settings.sizes
    return Outcome(
        "Comparison",
        (
            f"{sizes.train or 'All'} training images, {epochs} epochs of SGD with momentum 0.9 and batches of 128, one "
            f"draw of the weights a step and {settings.samples} in a prediction, seeds {list(job.seeds)}. Errors on "
            f"{sizes.test or 'all'} test images; unknown images are the other data set's; 15 corruptions at the "
            f"highest severity on {sizes.corrupted or 'all'} test images. Implicit-bias inference starts at "
            "the prior of torch's own initial scales and takes plain's learning rate; see the docs for what was tried "
            "on validation images.",
        ),
        tables(rows),
        tuple(picture(rows, n) for n in settings.networks if any(r["key"]["network"] == n for r in rows)),
        {"rows": rows, "overhead": {name: vars(cost) for name, cost in costs.items()}},
        targets(rows, costs),
    )
