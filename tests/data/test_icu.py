import csv

import pytest
import torch

from dubito.data import icu
from dubito.data.icu import SHARED_FACTORS, SHARED_NUMBERS, patients_csv, rhc, support2


def support2_rows():
    rows = []
    for age, sex, event, time, disease in (
        ("60.5", "male", "1", "30", "ARF/MOSF"),
        ("61.5", "female", "1", "31", "Coma"),
        ("62.5", "male", "0", "344", "Cancer"),
        ("63.5", "male", "0", "12", "Cancer"),
    ):
        row = {f"num_{n}": "1.0" for n in icu._SUPPORT2_NUMBERS} | {
            f"fac_{n}": "no" for n in icu._SUPPORT2_FACTORS
        }
        rows.append(
            row | {"num_age": age, "fac_sex": sex, "event": event, "time": time, "fac_dzclass": disease}
        )
    rows[1]["num_alb"] = ""
    for row in rows:
        row |= {"fac_sfdm2": "<2 mo. follow-up", "fac_dnr": "no dnr", "pid": "0"}
    return rows


def rhc_rows():
    rows = []
    for age, sex, alb, first, second in (
        ("60.5", "Male", "3.5", "ARF", "missing"),
        ("61.5", "Male", "3.4", "ARF", "Coma"),
        ("70.5", "Female", "2.0", "COPD", "missing"),
    ):
        row = dict.fromkeys(icu._RHC_NUMBERS.values(), "2.0") | dict.fromkeys(icu._RHC_FACTORS.values(), "No")
        row |= {"num_age": age, "fac_sex": sex, "num_alb1": alb, "fac_cat1": first, "fac_cat2": second}
        rows.append(row | {"event": "1", "time": "5"})
    return rows


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_outcomes_at_thirty_days_and_nothing_that_happened_later(tmp_path):
    write(tmp_path / "support2.csv", support2_rows())
    patients = support2(tmp_path)
    assert patients.died.tolist() == [True, False, False]  # day 30 counts, day 31 does not
    assert patients.unknown == 1  # followed for 12 days only
    assert patients.group == ("arf/mosf", "coma", "cancer")
    assert bool(patients.features.numbers["alb"][1].isnan())
    names = {*patients.features.numbers, *patients.features.factors}
    assert not names & {"sfdm2", "dnr", "time", "event", "pid", "dzclass", "dzgroup"}


def test_rhc_has_the_shared_names_levels_and_gaps(tmp_path):
    write(tmp_path / "rhc.csv", rhc_rows())
    patients = rhc(tmp_path)
    assert tuple(patients.features.numbers) == SHARED_NUMBERS
    assert tuple(patients.features.factors) == SHARED_FACTORS
    assert patients.features.factors["sex"] == ("male", "male", "female")
    assert patients.group == ("ARF".lower(), "coma", "copd")
    albumin = patients.features.numbers["alb"]
    assert albumin.isnan().tolist() == [True, False, False]  # 3.5 stands for "not measured"


def test_people_already_seen_are_left_out(tmp_path):
    write(tmp_path / "support2.csv", support2_rows())
    write(tmp_path / "rhc.csv", rhc_rows())
    left = rhc(tmp_path).unseen(support2(tmp_path))
    assert left.person == ((61.5, "male"), (70.5, "female"))  # 61.5 and female is somebody else


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"event": "2"}, "line 2: event must be 0 or 1"),
        ({"time": ""}, "line 2: event must be 0 or 1 and time"),
        ({"num_age": "old"}, "line 2, column 'num_age': 'old' is not a number"),
    ],
)
def test_wrong_entries_are_told(tmp_path, change, message):
    rows = support2_rows()
    rows[0] |= change
    write(tmp_path / "support2.csv", rows)
    with pytest.raises(ValueError, match=message):
        support2(tmp_path)


def test_a_missing_column_is_named(tmp_path):
    rows = support2_rows()
    for row in rows:
        del row["num_bun"]
    write(tmp_path / "support2.csv", rows)
    with pytest.raises(ValueError, match="no column 'num_bun'"):
        support2(tmp_path)


def test_a_table_of_ones_own(tmp_path):
    (tmp_path / "train.csv").write_text("hr,temp,label\n80,,1\n90,37,0\n")
    features, died = patients_csv("train", tmp_path)
    assert died.tolist() == [True, False]
    assert bool(features.numbers["temp"][0].isnan())
    (tmp_path / "train.csv").write_text("hr,label\n80,2\n")
    with pytest.raises(ValueError, match="label that is 0 or 1"):
        patients_csv("train", tmp_path)
    (tmp_path / "train.csv").write_text("hr,died\n80,1\n")
    with pytest.raises(ValueError, match="no column 'label'"):
        patients_csv("train", tmp_path)
    with pytest.raises(FileNotFoundError):
        patients_csv("test", tmp_path)


def test_rows_keep_what_belongs_together(tmp_path):
    write(tmp_path / "support2.csv", support2_rows())
    part = support2(tmp_path).rows(torch.tensor([2, 0]))
    assert len(part) == 2
    assert part.person == ((62.5, "male"), (60.5, "male"))
    assert part.died.tolist() == [False, True]
    assert part.group == ("cancer", "arf/mosf")
