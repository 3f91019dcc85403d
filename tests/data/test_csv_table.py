import gzip
import math

import pytest

from dubito.data.csv_table import CsvTable, find_csv, read_csv

TEXT = 'a,b,word\n1,2.5,"x, y"\nNA,,z\n'


def test_a_table_is_read_plain_or_compressed(tmp_path):
    (tmp_path / "plain.csv").write_text(TEXT)
    (tmp_path / "small.csv.gz").write_bytes(gzip.compress(TEXT.encode()))
    for name in ("plain.csv", "small.csv.gz"):
        table = read_csv(tmp_path / name)
        assert len(table) == 2
        assert table.text("word") == ("x, y", "z")
        first, second = table.numbers("a").tolist()
        assert first == 1.0
        assert math.isnan(second)
        assert table.numbers("b")[0] == 2.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(TEXT.encode(), mtime=0)[:-12], "broken gzip"),
        (gzip.compress(TEXT.encode(), mtime=0)[:10] + b"\xff" * 40, "broken gzip"),
        (b"a,b\n", "no rows"),
        (b"", "no rows"),
        (b"a,a\n1,2\n", "two columns called 'a'"),
        (b"a,b\n1,2\n3\n", r"line 3: 1 entries under 2 headings.*cut short"),
        (b"a\n\xff\xfe\n", "not UTF-8"),
        (b'a,b\n1,"2\n', "comma-separated"),
    ],
)
def test_damaged_files_are_told(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_csv(path)


def test_wrong_columns_and_entries_are_told():
    table = CsvTable("there.csv", {"temperature": ("1", "warm"), "other": ("1", "inf")})
    with pytest.raises(ValueError, match=r"no column 'temp'.*nearest it has are 'temperature'"):
        table.text("temp")
    with pytest.raises(ValueError, match=r"line 3, column 'temperature': 'warm' is not a number"):
        table.numbers("temperature")
    with pytest.raises(ValueError, match="'inf' is not a number"):
        table.numbers("other")


def test_files_are_found_by_folder_or_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"pass root=.*DUBITO_DATA"):
        find_csv(None, "icu", "rhc")
    (tmp_path / "icu").mkdir()
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"neither rhc\.csv\.gz nor rhc\.csv in .*icu"):
        find_csv(None, "icu", "rhc")
    (tmp_path / "icu" / "rhc.csv").write_text(TEXT)
    assert find_csv(None, "icu", "rhc") == tmp_path / "icu" / "rhc.csv"
    assert find_csv(tmp_path / "icu", "elsewhere", "rhc") == tmp_path / "icu" / "rhc.csv"
