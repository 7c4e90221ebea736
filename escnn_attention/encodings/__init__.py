r"""Continuous positional encodings :math:`\rho(\delta, p)`.

An encoding is a function of an offset :math:`\delta \in R^d` and a pose p, and the layers evaluate it at
:math:`(h^{-1}\Delta, h^{-1}\hat h)`: the group acts on the *argument* of a continuous function, so that no table of
weights is ever interpolated (GSA-Nets, Section 5.1). All encodings here but the rotary one are sums

.. math:: \rho(\delta, p) = \rho_x(\delta) + E[p]

of a function of the offset and a learned table over the poses, which lets every backend keep the two apart. Where the
group is continuous and has no table, E is a network of the matrix of p. Offsets are measured in units of the window's
reach, so that they lie in [-1, 1] along the axes.

**Initialisation.** With inputs of unit variance queries and keys have unit variance, so the content score
:math:`\langle q, k\rangle/\sqrt C` has variance 1. The encodings are scaled to add a positional score of variance 1
too, half of it from the offset and half from the pose. Softmax over n keys with Gaussian scores of variance
:math:`\sigma^2` attends to about :math:`n e^{-\sigma^2/2}` of them (its perplexity): at :math:`\sigma^2 = 2` to a
third, which is neither uniform nor saturated.
"""

from escnn_attention.encodings.base import AbsoluteEncoding, Encoding, MLPEncoding, NoEncoding, SeparableEncoding
from escnn_attention.encodings.convolutional import ConvolutionalEncoding
from escnn_attention.encodings.frequencies import FourierEncoding, RotaryEncoding
from escnn_attention.encodings.names import as_encoding
from escnn_attention.encodings.pair_kernel import PairKernel
from escnn_attention.encodings.quadratic import QuadraticEncoding

__all__ = [
    "AbsoluteEncoding",
    "ConvolutionalEncoding",
    "Encoding",
    "FourierEncoding",
    "MLPEncoding",
    "NoEncoding",
    "PairKernel",
    "QuadraticEncoding",
    "RotaryEncoding",
    "SeparableEncoding",
    "as_encoding",
]
