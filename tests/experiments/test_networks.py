import pytest
import torch

from dubito.experiments.networks import small_cnn


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (28, 28), (13, 30)])
def test_any_size_gives_logits(size):
    network = small_cnn(size, 7, channels=2)
    assert network(torch.zeros(3, 2, *size)).shape == (3, 7)


def test_too_small_an_image_is_refused():
    with pytest.raises(ValueError, match="at least 4"):
        small_cnn((3, 28), 10)
