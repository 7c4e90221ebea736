"""Lightning data modules for images, fields and point clouds."""

from escnn_attention.training.data.clouds.base import Clouds
from escnn_attention.training.data.clouds.charged_particles import ChargedParticles
from escnn_attention.training.data.clouds.constellations import Constellations
from escnn_attention.training.data.clouds.qm9 import QM9
from escnn_attention.training.data.clouds.shapes import ModelNet40, SampledSolids
from escnn_attention.training.data.clouds.springs import Springs
from escnn_attention.training.data.fields import FieldData, PoissonOnTorus
from escnn_attention.training.data.images.canvas import DigitCanvas
from escnn_attention.training.data.images.cifar10 import CIFAR10
from escnn_attention.training.data.images.digits import Digits
from escnn_attention.training.data.images.mnist import MNIST
from escnn_attention.training.data.images.patch_camelyon import PatchCamelyon
from escnn_attention.training.data.images.rotmnist import RotMNIST

__all__ = [
    "CIFAR10",
    "MNIST",
    "QM9",
    "ChargedParticles",
    "Clouds",
    "Constellations",
    "DigitCanvas",
    "Digits",
    "FieldData",
    "ModelNet40",
    "PatchCamelyon",
    "PoissonOnTorus",
    "RotMNIST",
    "SampledSolids",
    "Springs",
]
