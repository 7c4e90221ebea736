"""Data: Lightning data modules for published data sets, and the images of the comparison."""

from escnn_attention.training.data.cifar10 import CIFAR10
from escnn_attention.training.data.comparison import load_data, load_digits
from escnn_attention.training.data.mnist import MNIST
from escnn_attention.training.data.patch_camelyon import PatchCamelyon
from escnn_attention.training.data.rotmnist import RotMNIST

__all__ = ["CIFAR10", "MNIST", "PatchCamelyon", "RotMNIST", "load_data", "load_digits"]
