"""Data: Lightning data modules for images and point clouds, and the images of the comparison."""

from escnn_attention.training.data.cifar10 import CIFAR10
from escnn_attention.training.data.constellations import Constellations
from escnn_attention.training.data.digits import Digits
from escnn_attention.training.data.mnist import MNIST
from escnn_attention.training.data.patch_camelyon import PatchCamelyon
from escnn_attention.training.data.points import Clouds
from escnn_attention.training.data.qm9 import QM9
from escnn_attention.training.data.rotmnist import RotMNIST
from escnn_attention.training.data.shapes import ModelNet40, SampledSolids
from escnn_attention.training.data.springs import Springs

__all__ = [
    "CIFAR10",
    "MNIST",
    "QM9",
    "Clouds",
    "Constellations",
    "Digits",
    "ModelNet40",
    "PatchCamelyon",
    "RotMNIST",
    "SampledSolids",
    "Springs",
]
