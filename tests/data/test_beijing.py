import datetime
import math

import pytest
import torch

from dubito.data.beijing import COLUMNS, WEATHER, Hours, beijing

HEADINGS = "No,year,month,day,hour,pm2.5,DEWP,TEMP,PRES,cbwd,Iws,Is,Ir"


def lines(hours=60, start="2010-12-30 00:00", missing=()):
    begin = datetime.datetime.fromisoformat(start)
    for i in range(hours):
        t = begin + datetime.timedelta(hours=i)
        dust = "NA" if i in missing else str(i)
        yield f"{i},{t.year},{t.month},{t.day},{t.hour},{dust},-5,{t.hour},1020,{('NE', 'cv')[i % 2]},{i % 7},0,0"


def write(path, body):
    (path / "beijing_pm25.csv").write_text("\n".join([HEADINGS, *body]) + "\n")
    return path


def test_columns_are_the_fifteen(tmp_path):
    hours = beijing(write(tmp_path, lines()))
    assert hours.values.shape == (60, 15)
    assert len(set(COLUMNS)) == 15
    row = dict(zip(COLUMNS, hours.values[6].tolist(), strict=True))
    assert row["pm2.5"] == 6
    assert row["TEMP"] == 6
    assert row["Iws"] == pytest.approx(math.log(7))
    assert (row["wind=NE"], row["wind=cv"]) == (1.0, 0.0)
    assert row["hour sin"] == pytest.approx(1.0)
    assert torch.allclose(hours.values[:, 7:11].sum(1), torch.ones(60, dtype=torch.float64))


def test_windows_end_before_their_target_and_hold_no_gap(tmp_path):
    hours = beijing(write(tmp_path, lines(missing=(10,))))
    targets = hours.targets((2010, 2011), length=24)
    assert targets.tolist() == list(range(35, 60))  # 10 is in the window of every hour up to 34
    windows = hours.windows(targets, 24)
    assert windows.shape == (25, 24, 15)
    assert torch.equal(windows[0, :, 0], torch.arange(11.0, 35.0).double())
    assert hours.dust[targets[0]] == 35


def test_years_are_those_of_the_target(tmp_path):
    hours = beijing(write(tmp_path, lines()))
    assert hours.targets((2010,)).tolist() == list(range(24, 48))
    assert hours.targets((2011,)).tolist() == list(range(48, 60))
    assert hours.targets((2012,)).tolist() == []


def test_weather_of_another_season_leaves_dust_and_calendar(tmp_path):
    generator = torch.Generator().manual_seed(0)
    length = 24 * 365
    values = torch.rand(2 * length, 15, generator=generator, dtype=torch.float64)
    hour = torch.arange(2 * length) % 24
    values[:, COLUMNS.index("TEMP")] = hour.double()
    year = torch.tensor([2013] * length + [2014] * length)
    turned = Hours(values, year).with_weather_of_another_season()
    weather = [COLUMNS.index(name) for name in WEATHER]
    rest = [i for i in range(15) if i not in weather]
    assert torch.equal(turned.values[:, rest], values[:, rest])
    assert torch.equal(turned.values[:, COLUMNS.index("TEMP")], hour.double())  # the hour of the day stays
    later = (torch.arange(length) + 24 * 183) % length
    assert torch.equal(turned.values[length:, weather], values[length:][later][:, weather])
    assert torch.equal(turned.values[:length, weather], values[:length][later][:, weather])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([*lines(3), *lines(2, "2011-01-01 00:00")], "does not follow"),
        (["0,2010,2,30,0,1,1,1,1,NE,1,0,0"], "line 2: no date and hour"),
        (["0,2010,2,3,0,1,1,1,1,XX,1,0,0"], "not 'XX'"),
        (["0,2010,2,3,0,1,NA,1,1,NE,1,0,0"], "'DEWP' has missing"),
    ],
)
def test_wrong_files_are_told(tmp_path, body, message):
    with pytest.raises(ValueError, match=message):
        beijing(write(tmp_path, body))


def test_another_city_by_its_name(tmp_path):
    write(tmp_path, lines(3)).joinpath("beijing_pm25.csv").rename(tmp_path / "guangzhou_pm25.csv")
    text = (tmp_path / "guangzhou_pm25.csv").read_text().replace("NE", "SW")
    (tmp_path / "guangzhou_pm25.csv").write_text(text)
    hours = beijing(tmp_path, "guangzhou_pm25")
    assert hours.values[0, [COLUMNS.index(n) for n in COLUMNS if n.startswith("wind")]].tolist() == [0.0] * 4
