"""The equivariant modules, one concept a file."""

from escnn_attention.nn.attentive import AttentionMaps, AttentiveConv, FeatureAttention, PoseAttention
from escnn_attention.nn.conditioning import ConditionedFieldNorm, ConditionedGate, TimestepEmbedding
from escnn_attention.nn.convolution import attention_from_convolution
from escnn_attention.nn.cross_attention import GroupCrossAttention
from escnn_attention.nn.cuda_graphs import CudaGraphs
from escnn_attention.nn.dilation import (
    DilationLiftingSelfAttention,
    DilationSelfAttention,
    PerScale,
    ScalePooling,
    Scales,
)
from escnn_attention.nn.embeddings import PatchDecoder, PatchEmbedding, PositionEmbedding, PositionTable
from escnn_attention.nn.frame_lift import FrameLift
from escnn_attention.nn.invariants import AttentionPool, PointAttentionPool, PowerSpectrum
from escnn_attention.nn.norms import FieldBatchNorm, FieldLayerNorm
from escnn_attention.nn.point_attention import PointAttentiveConv, PointSelfAttention
from escnn_attention.nn.point_lift import LiftAverage, PointLift
from escnn_attention.nn.pointwise import GELU, DropPath, FieldLinear, LayerScale, PoseFeedForward, PoseLinear, SiLU
from escnn_attention.nn.resample import AntialiasedPool, Crop, HalvingPool
from escnn_attention.nn.self_attention import GroupSelfAttention, LiftingSelfAttention
from escnn_attention.nn.sphere import SphereSelfAttention, SphereTransformerBlock
from escnn_attention.nn.summary import LayerSummary, Summary, summary
from escnn_attention.nn.transformer import PointTransformerBlock, TransformerBlock

__all__ = [
    "GELU",
    "AntialiasedPool",
    "AttentionMaps",
    "AttentionPool",
    "AttentiveConv",
    "ConditionedFieldNorm",
    "ConditionedGate",
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
    "GroupCrossAttention",
    "GroupSelfAttention",
    "HalvingPool",
    "LayerScale",
    "LayerSummary",
    "LiftAverage",
    "LiftingSelfAttention",
    "PatchDecoder",
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
    "TimestepEmbedding",
    "TransformerBlock",
    "attention_from_convolution",
    "summary",
]
