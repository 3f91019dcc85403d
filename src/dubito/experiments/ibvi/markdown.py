"""The kept rows of the comparison as Markdown, for the docs: `python -m dubito.experiments.ibvi.markdown FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dubito.experiments.ibvi.verdict import tables, targets


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tables by data set and network, then each target with "met" or "missed"."""
    lines: list[str] = []
    for table in tables(rows):
        lines += [f"**{table.caption}**", "", "| | " + " | ".join(table.columns) + " |"]
        lines.append("|---|" + "---:|" * len(table.columns))
        lines += [f"| {row.label} | " + " | ".join(row.cells) + " |" for row in table.rows]
        lines.append("")
    lines += [f"- {'met' if met else '**missed**'}: {what}" for what, met in targets(rows, {}).items()]
    return "\n".join(lines)


def main(folder: str) -> None:
    """Print what is in the folder's files."""
    rows = [row for path in sorted(Path(folder).glob("*.json")) for row in json.loads(path.read_text())]
    print(markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1])
