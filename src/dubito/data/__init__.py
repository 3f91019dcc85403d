"""Real images that need no download, out-of-distribution partners and corruptions."""

from dubito.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from dubito.data.digits import MissingExtraError, digits_8x8, digits_mnist5k, fashion_mnist, mnist
from dubito.data.idx import read_idx
from dubito.data.images import DataSplit, Images, split_images, stratified_split
from dubito.data.letters import letters
from dubito.data.registry import DATASETS, DatasetEntry, UnknownDataError, check_dataset_name, load_dataset

__all__ = [
    "CORRUPTIONS",
    "DATASETS",
    "SEVERITIES",
    "DataSplit",
    "DatasetEntry",
    "Images",
    "MissingExtraError",
    "UnknownDataError",
    "check_dataset_name",
    "corrupt",
    "digits_8x8",
    "digits_mnist5k",
    "fashion_mnist",
    "letters",
    "load_dataset",
    "mnist",
    "read_idx",
    "split_images",
    "stratified_split",
]
