"""Exact equivariant attention for escnn."""

from importlib.util import find_spec

__version__ = "0.1.0"

# Exported networks load without escnn; everything else needs it.
if find_spec("escnn") is not None:
    from escnn_attention._escnn import compat

    compat.apply()

    import escnn as escnn  # so that ``from escnn_attention import escnn`` works in any order of imports

    from escnn_attention._escnn import bases, buffers, pickling, trees

    pickling.register()
    bases.register()
    buffers.register()
    trees.register()

    from escnn_attention.encodings import (
        AbsoluteEncoding,
        ConvolutionalEncoding,
        Encoding,
        FourierEncoding,
        MLPEncoding,
        NoEncoding,
        PairKernel,
        QuadraticEncoding,
        RotaryEncoding,
        SeparableEncoding,
    )
    from escnn_attention.equivariance import EquivarianceReport, assert_equivariant, equivariance_report
    from escnn_attention.functional import working_memory
    from escnn_attention.geometry.relations import LiftedMotion, LogMotion, LogPolar, Offset, Pair, Relation
    from escnn_attention.geometry.sphere import SphereGrid
    from escnn_attention.groups.samples import Samples
    from escnn_attention.groups.sequences import sequence_space, space_time
    from escnn_attention.groups.spaces import tetraOnR3
    from escnn_attention.nn.attentive import AttentiveConv, FeatureAttention, PoseAttention
    from escnn_attention.nn.conditioning import ConditionedFieldNorm, ConditionedGate
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
    from escnn_attention.plain.attentive import AttentionMaps
    from escnn_attention.plain.conditioning import TimestepEmbedding
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(
                f"escnn_attention.{name} needs escnn: pip install --no-deps escnn (without --no-deps pip builds py3nj "
                "from Fortran source and brings NumPy 1; escnn can do without)"
            )
        raise AttributeError(f"module 'escnn_attention' has no attribute {name!r}")


__all__ = [
    "GELU",
    "AbsoluteEncoding",
    "AntialiasedPool",
    "AttentionMaps",
    "AttentionPool",
    "AttentiveConv",
    "ConditionedFieldNorm",
    "ConditionedGate",
    "ConvolutionalEncoding",
    "Crop",
    "CudaGraphs",
    "DilationLiftingSelfAttention",
    "DilationSelfAttention",
    "DropPath",
    "Encoding",
    "EquivarianceReport",
    "FeatureAttention",
    "FieldBatchNorm",
    "FieldLayerNorm",
    "FieldLinear",
    "FourierEncoding",
    "FrameLift",
    "GroupCrossAttention",
    "GroupSelfAttention",
    "HalvingPool",
    "LayerScale",
    "LayerSummary",
    "LiftAverage",
    "LiftedMotion",
    "LiftingSelfAttention",
    "LogMotion",
    "LogPolar",
    "MLPEncoding",
    "NoEncoding",
    "Offset",
    "Pair",
    "PairKernel",
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
    "QuadraticEncoding",
    "Relation",
    "RotaryEncoding",
    "Samples",
    "ScalePooling",
    "Scales",
    "SeparableEncoding",
    "SiLU",
    "SphereGrid",
    "SphereSelfAttention",
    "SphereTransformerBlock",
    "Summary",
    "TimestepEmbedding",
    "TransformerBlock",
    "assert_equivariant",
    "attention_from_convolution",
    "equivariance_report",
    "sequence_space",
    "space_time",
    "summary",
    "tetraOnR3",
    "working_memory",
]
