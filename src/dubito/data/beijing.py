"""Fine dust over Beijing, hourly from 2010 to 2014, with the weather (Liang et al. 2015; UCI 381)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.data.csv_table import CsvTable, TableError, find_csv, read_csv

WINDS = ("NE", "NW", "SE", "cv")
WEATHER = ("DEWP", "TEMP", "PRES", "Iws", "Is", "Ir", *(f"wind={wind}" for wind in WINDS))
CALENDAR = ("hour sin", "hour cos", "year sin", "year cos")
COLUMNS = ("pm2.5", *WEATHER, *CALENDAR)
_CUMULATED = ("Iws", "Is", "Ir")  # wind speed, hours of snow and of rain, added up: long tails


@dataclass(frozen=True)
class Hours:
    """Consecutive hours.

    Attributes:
        values: float64 `(N, 15)`, the columns of `COLUMNS`: dust in µg/m³ (NaN where missing), dew point and
            temperature in °C, pressure in hPa, log(1 + x) of cumulated wind speed, snow and rain, the wind's direction
            as zeros and ones, and hour and day of the year on circles.
        year: whole numbers `(N,)`.
    """

    values: Tensor
    year: Tensor

    def __len__(self) -> int:
        return len(self.year)

    @property
    def dust(self) -> Tensor:
        """PM2.5, `(N,)`, µg/m³."""
        return self.values[:, 0]

    def targets(self, years: tuple[int, ...], length: int = 24) -> Tensor:
        """Hours of those years whose dust, and that of the `length` hours before, is known: whole numbers `(M,)`."""
        known = (~self.dust.isnan()).long()
        whole = known.unfold(0, length + 1, 1).sum(1) == length + 1
        wanted = torch.isin(self.year[length:], torch.tensor(years))
        return (whole & wanted).nonzero().squeeze(1) + length

    def windows(self, targets: Tensor, length: int = 24) -> Tensor:
        """The `length` hours before each target hour, `(M, length, 15)`; the target hour itself is not in it."""
        return self.values[targets[:, None] + torch.arange(-length, 0)]

    def with_weather_of_another_season(self, days: int = 183) -> Hours:
        """The same dust and calendar, under the weather of `days` later in the same year (the year taken as a ring).

        Every value was measured, and at the same hour of the day; only the season of the weather is wrong.
        """
        values = self.values.clone()
        at = [COLUMNS.index(name) for name in WEATHER]
        for year in self.year.unique().tolist():
            own = (self.year == year).nonzero().squeeze(1)
            values[own[:, None], torch.tensor(at)] = self.values[own.roll(-24 * days)][:, at]
        return Hours(values, self.year)


def beijing(root: str | os.PathLike[str] | None = None, stem: str = "beijing_pm25") -> Hours:
    """The 43,824 hours of 2010 to 2014, 2,067 of them without a measurement of dust.

    Args:
        root: folder of `beijing_pm25.csv[.gz]`; by default `air-quality` in the folder named by `DUBITO_DATA`.
        stem: of the file's name; that of another city with the same headings, where one is there. A south-westerly
            wind, which Beijing's file does not have, has zeros in all four columns.

    Raises:
        FileNotFoundError: if it is not there.
        TableError: if it is damaged, has other columns, or leaves out hours.
    """
    table = read_csv(find_csv(root, "air-quality", stem))
    time = {name: table.numbers(name) for name in ("year", "month", "day", "hour")}
    days = _consecutive(table, time)
    columns: dict[str, Tensor] = {"pm2.5": table.numbers("pm2.5")}
    for name in ("DEWP", "TEMP", "PRES", "Iws", "Is", "Ir"):
        columns[name] = table.numbers(name)
        if name in _CUMULATED:
            columns[name] = columns[name].log1p()
        if not bool(columns[name].isfinite().all()):
            raise TableError(f"{table.source}: the weather column {name!r} has missing or negative entries")
    columns |= _winds(table) | _circles(time["hour"], days)
    return Hours(torch.stack([columns[name] for name in COLUMNS], 1), time["year"].long())


def _winds(table: CsvTable) -> dict[str, Tensor]:
    given = table.text("cbwd")
    strange = sorted(set(given) - {*WINDS, "SW"})
    if strange:
        raise TableError(f"{table.source}: the wind cbwd is one of {', '.join(WINDS)}, not {strange[0]!r}")
    return {f"wind={wind}": torch.tensor([one == wind for one in given]).double() for wind in WINDS}


def _circles(hour: Tensor, days: Tensor) -> dict[str, Tensor]:
    clock, season = 2 * math.pi * hour / 24, 2 * math.pi * days / 365.25
    return {
        "hour sin": clock.sin(),
        "hour cos": clock.cos(),
        "year sin": season.sin(),
        "year cos": season.cos(),
    }


def _consecutive(table: CsvTable, time: Mapping[str, Tensor]) -> Tensor:
    """Day of the year of each row, once it is known that every row is an hour after the one before."""
    import datetime

    stamps = []
    for row, parts in enumerate(
        zip(*(time[name].tolist() for name in ("year", "month", "day", "hour")), strict=True)
    ):
        try:
            stamps.append(datetime.datetime(*(int(part) for part in parts)))  # type: ignore[arg-type]
        except ValueError as error:
            raise TableError(f"{table.source}, line {row + 2}: no date and hour ({error})") from error
        if row and stamps[-1] - stamps[-2] != datetime.timedelta(hours=1):
            raise TableError(
                f"{table.source}, line {row + 2}: {stamps[-1]} does not follow {stamps[-2]} by an hour, and windows "
                "need every hour"
            )
    return torch.tensor([float(stamp.timetuple().tm_yday) for stamp in stamps], dtype=torch.float64)
