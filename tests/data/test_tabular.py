import pytest
import torch

from dubito.data.tabular import Features, Preparation

NAN = float("nan")


def features(numbers, words=("a", "b", "a", "b")):
    return Features({"x": torch.tensor(numbers, dtype=torch.float64)}, {"kind": tuple(words)})


def test_training_rows_alone_decide():
    train = features([1.0, 2.0, NAN, 3.0])
    prepare = Preparation.fit(train)
    assert prepare.names == ("x", "x missing", "kind=a", "kind=b")
    matrix = prepare(train)
    assert matrix.dtype == torch.float32
    assert torch.allclose(matrix[:, 0].mean(), torch.zeros(()), atol=1e-6)
    assert torch.allclose(matrix[:, 0].std(unbiased=False), torch.ones(()))
    assert matrix[2, 0] == 0.0  # the median of 1, 2, 3 is also the mean
    assert matrix[:, 1].tolist() == [0.0, 0.0, 1.0, 0.0]
    other = prepare(features([1e9, NAN, 2.0, -1e9], ("c", "a", "b", "c")))
    least, most, _, mean, sd = prepare.numbers["x"]
    assert torch.allclose(other[0, 0], torch.tensor((most - mean) / sd, dtype=torch.float32))
    assert torch.allclose(other[3, 0], torch.tensor((least - mean) / sd, dtype=torch.float32))
    assert other[0, 2:].tolist() == [0.0, 0.0]  # a level that training did not have
    assert torch.equal(prepare(train), matrix)  # the other rows left no trace


def test_reach_is_in_interquartile_ranges():
    column = torch.cat([torch.arange(100.0), torch.tensor([1e6])]).double()
    prepare = Preparation.fit(Features({"x": column}, {}), reach=2.0)
    least, most = prepare.numbers["x"][:2]
    low, high = (float(torch.quantile(column, q)) for q in (0.25, 0.75))
    assert (least, most) == pytest.approx((low - 2 * (high - low), high + 2 * (high - low)))


def test_mostly_equal_columns_are_not_flattened():
    column = torch.tensor([0.0] * 9 + [1.0], dtype=torch.float64)
    matrix = Preparation.fit(Features({"x": column}, {}))(Features({"x": column}, {}))
    assert matrix[9, 0] > matrix[0, 0]


def test_rows_and_columns_can_be_chosen():
    table = features([1.0, 2.0, NAN, 3.0])
    part = table.rows(torch.tensor([3, 0]))
    assert part.numbers["x"].tolist() == [3.0, 1.0]
    assert part.factors["kind"] == ("b", "a")
    assert table.only(("x",), ()).factors == {}
    with pytest.raises(KeyError):
        table.only(("y",), ())


def test_a_column_without_values_is_told():
    with pytest.raises(ValueError, match="'x' has no measured value"):
        Preparation.fit(features([NAN] * 4))
