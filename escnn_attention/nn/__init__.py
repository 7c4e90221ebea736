"""The equivariant modules, one concept a file."""

from escnn_attention.nn.activations import GELU, SiLU
from escnn_attention.nn.attention_pool import AttentionPool, PointAttentionPool
from escnn_attention.nn.attentive_conv import AttentiveConv
from escnn_attention.nn.batch_norm import FieldBatchNorm
from escnn_attention.nn.branches import DropPath, LayerScale
from escnn_attention.nn.convolution import attention_from_convolution
from escnn_attention.nn.cuda_graphs import CudaGraphs
from escnn_attention.nn.dilation import DilationLiftingSelfAttention, DilationSelfAttention
from escnn_attention.nn.feature_attention import AttentionMaps, FeatureAttention
from escnn_attention.nn.frame_lift import FrameLift
from escnn_attention.nn.kernels import complete_basis, fit_kernel
from escnn_attention.nn.layer_norm import FieldLayerNorm
from escnn_attention.nn.patch_embedding import PatchEmbedding
from escnn_attention.nn.point_attention import PointAttentiveConv, PointSelfAttention
from escnn_attention.nn.point_lift import LiftAverage, PointLift
from escnn_attention.nn.point_transformer import PointTransformerBlock
from escnn_attention.nn.pose_attention import PoseAttention
from escnn_attention.nn.pose_linear import FieldLinear, PoseFeedForward, PoseLinear
from escnn_attention.nn.position_embedding import PositionEmbedding
from escnn_attention.nn.position_table import PositionTable
from escnn_attention.nn.power_spectrum import PowerSpectrum
from escnn_attention.nn.resample import AntialiasedPool, Crop, HalvingPool
from escnn_attention.nn.scales import PerScale, ScalePooling, Scales
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.nn.sphere_attention import SphereSelfAttention
from escnn_attention.nn.sphere_transformer import SphereTransformerBlock
from escnn_attention.nn.summary import LayerSummary, Summary, summary
from escnn_attention.nn.transformer import TransformerBlock

__all__ = [
    "GELU",
    "AntialiasedPool",
    "AttentionMaps",
    "AttentionPool",
    "AttentiveConv",
    "Crop",
    "CudaGraphs",
    "DilationLiftingSelfAttention",
    "DilationSelfAttention",
    "DropPath",
    "FeatureAttention",
    "FieldBatchNorm",
    "FieldLayerNorm",
    "FieldLinear",
    "FrameLift",
    "GroupSelfAttention",
    "HalvingPool",
    "LayerScale",
    "LayerSummary",
    "LiftAverage",
    "LiftingSelfAttention",
    "PatchEmbedding",
    "PerScale",
    "PointAttentionPool",
    "PointAttentiveConv",
    "PointLift",
    "PointSelfAttention",
    "PointTransformerBlock",
    "PoseAttention",
    "PoseFeedForward",
    "PoseLinear",
    "PositionEmbedding",
    "PositionTable",
    "PowerSpectrum",
    "ScalePooling",
    "Scales",
    "SiLU",
    "SphereSelfAttention",
    "SphereTransformerBlock",
    "Summary",
    "TransformerBlock",
    "attention_from_convolution",
    "complete_basis",
    "fit_kernel",
    "summary",
]
