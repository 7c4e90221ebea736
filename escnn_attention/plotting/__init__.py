"""Figures of equivariant networks and their attention (extra ``plot``).

Each function takes any model: a layer, a block, a sequential module, a classifier, or any torch module with such
layers inside. Encodings and attention maps are drawn of GroupSelfAttention and LiftingSelfAttention; attentive maps,
layers and images of AttentiveConv, FeatureAttention and PoseAttention; attention on clouds of PointSelfAttention and
PointAttentiveConv. Models run in evaluation mode and keep the mode that they had.

Every function returns a :class:`matplotlib.figure.Figure` (or an animation of one) without any ``pyplot`` state: save
it with ``figure.savefig("name.png")``, or let a notebook show it. Importing this module does not import matplotlib,
without which the functions raise an ImportError.
"""

from escnn_attention.plotting._cloud_drawing import CloudStyle
from escnn_attention.plotting._drawing import COLOURS
from escnn_attention.plotting._elements import name_element
from escnn_attention.plotting.attention_maps import plot_attention_maps
from escnn_attention.plotting.attentive_maps import plot_attended_images, plot_attentive_layers, plot_attentive_maps
from escnn_attention.plotting.cloud_attention import plot_cloud_attention
from escnn_attention.plotting.encodings import plot_encoding
from escnn_attention.plotting.equivariance_error import plot_equivariance_error
from escnn_attention.plotting.feature_maps import animate_feature_maps, plot_feature_maps

__all__ = [
    "COLOURS",
    "CloudStyle",
    "animate_feature_maps",
    "name_element",
    "plot_attended_images",
    "plot_attention_maps",
    "plot_attentive_layers",
    "plot_attentive_maps",
    "plot_cloud_attention",
    "plot_encoding",
    "plot_equivariance_error",
    "plot_feature_maps",
]
