"""The kept rows as Markdown, for the docs.

`python -m dubito.experiments.singular.markdown icu|air|sentiment FOLDER` prints them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dubito.experiments.singular import air_part, icu_part, sentiment_part
from dubito.experiments.singular.air_study import AirSettings, read_air
from dubito.experiments.singular.icu_study import IcuSettings, studies, ward_of
from dubito.report import Table


def markdown(tables: Sequence[Table], targets: Mapping[str, bool]) -> str:
    """Tables, then each target with "met" or "missed"."""
    lines: list[str] = []
    for table in tables:
        lines += [f"**{table.caption}**", "", "| | " + " | ".join(table.columns) + " |"]
        lines.append("|---|" + "---:|" * len(table.columns))
        lines += [f"| {row.label} | " + " | ".join(row.cells) + " |" for row in table.rows]
        lines.append("")
    lines += [f"- {'met' if met else '**missed**'}: {what}" for what, met in targets.items()]
    return "\n".join(lines)


def main(part: str, folder: str) -> None:
    """Print what is in the folder's file of a part; the sizes of the data are read anew."""
    rows: list[dict[str, Any]] = json.loads((Path(folder) / f"{part}.json").read_text(encoding="utf-8"))
    if part == "sentiment":
        print(markdown(sentiment_part.tables(rows), sentiment_part.targets(rows)))
    elif part == "icu":
        settings = IcuSettings()
        wards = {one.variant: ward_of(one.variant, settings.split) for one in studies(settings)}
        sizes = {name: (len(ward.test[0]), len(ward.shifted[0])) for name, ward in wards.items()}
        print(markdown(icu_part.tables(rows, sizes), icu_part.targets(rows)))
    else:
        settings_of_air = AirSettings()
        air = read_air(settings_of_air.length, settings_of_air.thinning)
        print(markdown(air_part.tables(rows, air), air_part.targets(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
