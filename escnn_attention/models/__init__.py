"""Networks built from the layers: those of the papers, and hybrids with steerable convolutions."""

from escnn_attention.models.classifier import EquivariantClassifier, InvariantLogits
from escnn_attention.models.gsa_net import GSANet
from escnn_attention.models.hybrid import HybridNet

__all__ = ["EquivariantClassifier", "GSANet", "HybridNet", "InvariantLogits"]
