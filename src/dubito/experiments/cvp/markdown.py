"""The kept rows as Markdown, for the docs.

`python -m dubito.experiments.cvp.markdown FOLDER` prints them; with the name of a page behind it, they take the place
of whatever that page has below its line `## Results`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dubito.experiments.cvp.verdict import TITLES, Values, in_words, overall, parts_of, tables, targets
from dubito.report import write_whole

HEADING = "\n## Results\n"


def markdown(rows: Sequence[Values]) -> str:
    """By part: tables, every difference with its interval, and what it decides; then what is said of all four."""
    lines: list[str] = []
    for part in parts_of(rows):
        lines += [f"### {TITLES[part][0].upper()}{TITLES[part][1:]}", "", _trained(rows, part), ""]
        for table in tables(rows, part):
            lines += [f"**{table.caption}**", "", "| | " + " | ".join(table.columns) + " |"]
            lines.append("|---|" + "---:|" * len(table.columns))
            lines += [f"| {row.label} | " + " | ".join(row.cells) + " |" for row in table.rows]
            lines.append("")
        lines += [f"- {said}" for said in in_words(rows, part)]
        lines += [f"- {what}: {'met' if met else '**missed**'}" for what, met in targets(rows, part).items()]
        lines.append("")
    whole = overall(rows)
    if whole:
        lines += ["### All four", ""]
        lines += [f"- {what}: {'met' if met else '**missed**'}" for what, met in whole.items()]
    return "\n".join(lines).rstrip() + "\n"


def _trained(rows: Sequence[Values], part: str) -> str:
    """Spread and what was tried, seed by seed."""
    by_seed = {int(r["key"]["seed"]): r for r in rows if r["key"]["data"] == part}
    said = []
    for seed, row in sorted(by_seed.items()):
        tried = ", ".join(f"{factor}: {nll:.4f}" for factor, nll in row["tried"].items())
        said.append(f"seed {seed}: spread {row['spread']:g} (validation NLL by spread {tried})")
    return "; ".join(said) + "."


def main(folder: str, page: str | None = None) -> None:
    """Print what is in the folder's files, or write it into a page.

    Raises:
        ValueError: if the page has no line `## Results`.
    """
    rows = [row for path in sorted(Path(folder).glob("*.json")) for row in json.loads(path.read_text())]
    text = markdown(rows)
    if page is None:
        print(text, end="")
        return
    before, line, _ = Path(page).read_text(encoding="utf-8").partition(HEADING)
    if not line:
        raise ValueError(f"{page} has no line {HEADING.strip()!r}, below which the results belong")
    write_whole(Path(page), before + HEADING + "\n" + text)


if __name__ == "__main__":
    main(*sys.argv[1:])
