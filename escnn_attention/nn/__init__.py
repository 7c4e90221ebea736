"""The equivariant modules, one concept a file."""

from escnn_attention.nn.convolution import attention_from_convolution
from escnn_attention.nn.dilation import (
    DilationLiftingSelfAttention,
    DilationSelfAttention,
    PerScale,
    ScalePooling,
    Scales,
)
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.pose_linear import PoseLinear
from escnn_attention.nn.resample import Crop, HalvingPool
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.nn.silu import SiLU
from escnn_attention.nn.transformer import TransformerBlock

__all__ = [
    "Crop",
    "DilationLiftingSelfAttention",
    "DilationSelfAttention",
    "FieldLayerNorm",
    "GroupSelfAttention",
    "HalvingPool",
    "LiftingSelfAttention",
    "PerScale",
    "PoseLinear",
    "ScalePooling",
    "Scales",
    "SiLU",
    "TransformerBlock",
    "attention_from_convolution",
]
