"""Networks built from the layers: those of the papers, and hybrids with steerable convolutions."""

from escnn_attention.exporting.modules import compile_package, exported
from escnn_attention.models.classifier import EquivariantClassifier, InvariantLogits, PoseMean, PositionSum
from escnn_attention.models.convolutions import Attention, DenseBlock, ResidualBlock
from escnn_attention.models.field_transformer import FieldTransformer
from escnn_attention.models.field_unet import FieldUNet
from escnn_attention.models.group_cnns import AllCNNC, GroupCNN, GroupDenseNet, ResNet44
from escnn_attention.models.gsa_net import GSANet
from escnn_attention.models.hamiltonian import HamiltonianNetwork
from escnn_attention.models.hybrid import CNN, HybridNet
from escnn_attention.models.lie_transformer import LieTransformer
from escnn_attention.models.platonic_transformer import PlatonicTransformer
from escnn_attention.models.point_transformer import PointTransformer
from escnn_attention.models.pretrained import PretrainedMixin
from escnn_attention.models.published import from_published
from escnn_attention.models.registry import create, from_pretrained, list_models
from escnn_attention.models.symmetric_tensors import symmetric_tensor_repr
from escnn_attention.models.vision_transformer import VisionTransformer
from escnn_attention.plain.point_network import SymmetricTensors

__all__ = [
    "CNN",
    "AllCNNC",
    "Attention",
    "DenseBlock",
    "EquivariantClassifier",
    "FieldTransformer",
    "FieldUNet",
    "GSANet",
    "GroupCNN",
    "GroupDenseNet",
    "HamiltonianNetwork",
    "HybridNet",
    "InvariantLogits",
    "LieTransformer",
    "PlatonicTransformer",
    "PointTransformer",
    "PoseMean",
    "PositionSum",
    "PretrainedMixin",
    "ResNet44",
    "ResidualBlock",
    "SymmetricTensors",
    "VisionTransformer",
    "compile_package",
    "create",
    "exported",
    "from_pretrained",
    "from_published",
    "list_models",
    "symmetric_tensor_repr",
]
