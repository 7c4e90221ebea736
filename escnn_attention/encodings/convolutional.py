"""The encoding with which attention starts as a convolution."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from escnn_attention._checks import check_int, check_length
from escnn_attention.encodings.base import Encoding, NoEncoding

_MOST = 1e6  # With this sharpness all other keys have weight zero in any precision.


class ConvolutionalEncoding(Encoding):
    r"""Each head starts at one place of a convolution, and learns to attend elsewhere.

    The first channel of a head encodes the distance to a place c and the pose :math:`p_0`, the others are another
    encoding :math:`\rho'`:

    .. math::
        \rho(\delta, p) = \big( -\sqrt C\, (\alpha \|\delta - c\|^2 + \beta_p),\; \rho'(\delta, p) \big),
        \qquad \beta_p = \alpha_0\, [p \ne p_0] .

    At initialisation the bias of the queries makes them the first unit vector, whatever the features are. Scores then
    depend on the position alone,

    .. math:: s_h(x; x', \hat h) = -\alpha \|h^{-1}\Delta - c\|^2 - \beta_{h^{-1}\hat h} ,

    and the layer *is* a convolution, away from the border: a linear map of the features by a steerable kernel. Head m
    reads the value at :math:`(x + hc_m, hp_0)` through a Gaussian; for a large sharpness it is the convolution with the
    kernel :math:`K(hc_m) = \rho_{out}(h)\, W^o_m W^v_m\, \rho_{in}(h)^{-1}` on the orbit of :math:`c_m`, and zero on
    the orbits of no head.

    The places are one of each orbit of the window's positions under H, in order of their distance from the middle. M
    heads take them at equal steps of this order; with more heads than orbits every orbit has one, and some have
    several. All heads prefer the pose of the output. ``projection="pointwise"`` does not distinguish poses; the places
    are then all positions with all poses.

    Everything is learned: c, :math:`\alpha` and :math:`\beta` of each head, and queries that depend on the features,
    which add content and :math:`\rho'` to the scores and change the sharpness.

    Args:
        encoding: :math:`\rho'`, relative and not rotary; by default :class:`NoEncoding`, with which only the first
            channel encodes positions and poses.
        sharpness: :math:`\alpha_0`, the initial difference between the score of the place and that of its neighbour:
            :math:`\alpha` is this over the square of their distance. With a small one heads move and mix their places
            from the first step on.
        content: the initial size of the queries' weights, relative to other encodings. At 0 the layer starts exactly as
            a convolution; the gradients of these weights are not 0.
        width, reach: for global attention, which has no window: the places of a lattice of ``width`` along each axis,
            the outermost of them at ``reach`` in units of the grid's longest side less one. On a grid of 7×7,
            ``width=3, reach=1/6`` is a convolution of 3×3.

    Attributes:
        centre: ``(num_heads, d)``, c in units of the window's reach.
        sharpness: ``(num_heads,)``, :math:`\alpha` for places at the distance of neighbours.
        pose_preference: ``(num_heads, |H|)``, :math:`-\beta`.
        rest: the other encoding.

    Raises:
        ValueError: it is absolute or rotary, or a number is not positive; on binding, a head has a single channel,
            queries have no bias, or the layer is not on a grid with a finite group.

    Example:
        >>> import torch
        >>> from escnn_attention import ConvolutionalEncoding, GroupSelfAttention
        >>> from escnn import gspaces, nn
        >>> g = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(g, 6 * [g.regular_repr])
        >>> layer = GroupSelfAttention(fields, fields, num_heads=3, kernel_size=3, encoding=ConvolutionalEncoding())
        >>> x, y = torch.randn(2, 1, 24, 6, 6)
        >>> both = layer(fields(x + y)).tensor + layer(fields(0 * x)).tensor
        >>> torch.allclose(both, layer(fields(x)).tensor + layer(fields(y)).tensor, atol=1e-5)  # it is linear
        True

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional Layers", ICLR
    2020, for the Gaussian; d'Ascoli et al., "ConViT", ICML 2021, and Zheng et al., "Structured Initialization for
    Vision Transformers", NeurIPS 2025, for the initialisation, without groups.
    """

    has_start = True

    def __init__(
        self,
        encoding: Encoding | None = None,
        *,
        sharpness: float = 1.0,
        content: float = 0.0,
        width: int | None = None,
        reach: float | None = None,
    ):
        super().__init__()
        rest = NoEncoding() if encoding is None else encoding
        if not isinstance(rest, Encoding):
            raise TypeError(f"encoding: got {type(rest).__name__}, needed an Encoding or None")
        if not rest.adds_to_keys:
            raise ValueError(f"encoding: got {type(rest).__name__}, needed one that is added to the keys and relative")
        if width is not None and check_int("width", width) % 2 == 0:
            raise ValueError(f"width: got {width}, needed an odd number")
        self.rest: Encoding = rest
        self.initial_sharpness = check_length("sharpness", sharpness, "number", _MOST)
        self.content = 0.0 if content == 0 else check_length("content", content, "number, or 0", _MOST)
        self.width = width
        self.reach = None if reach is None else check_length("reach", reach, most=1.0)
        self.centre: Parameter | None = None
        self.sharpness: Parameter | None = None
        self.pose_preference: Parameter | None = None
        self.step = 1.0

    def _build(self) -> None:
        if self._orbits is None:
            raise ValueError(
                "encoding: ConvolutionalEncoding has the places of a window, and needs a layer on a grid with a finite "
                "fiber group"
            )
        if self.channels < 2:
            raise ValueError(
                "encoding: ConvolutionalEncoding needs 2 channels, one for the place and one for the content, and a "
                f"head has {self.channels}; set head_fields to 2 or more"
            )
        with torch.device("cpu"):  # The meta device has no places to choose from.
            views = self._orbits.spread(self.num_heads, self.width, self.reach)
        self.step = views.step
        self.centre = Parameter(views.places.to(torch.get_default_device()))
        self.sharpness = Parameter(torch.full((self.num_heads,), self.initial_sharpness))
        if self.has_poses:
            others = 1 - F.one_hot(views.poses, self.num_poses)
            self.pose_preference = Parameter(-self.initial_sharpness * others.to(self.centre))
        self.rest = self.rest.bind(self.dim, self.num_heads, self.channels - 1, self.num_poses)

    def _build_offsets(self) -> None:
        """Nothing: see :meth:`_build`."""

    def start(self, queries: Tensor | None, bias: Tensor | None, keys: Tensor | None) -> None:
        assert queries is not None
        assert keys is not None
        if bias is None:
            raise ValueError("bias: got False, needed True: ConvolutionalEncoding starts with the bias of the queries")
        queries.mul_(self.content)
        bias.zero_()
        bias[:, 0] = 1.0
        keys[:, 0] = 0.0

    def offsets(self, delta: Tensor) -> Tensor | None:
        if self.centre is None or self.sharpness is None:
            return None
        heads = (self.num_heads, *[1] * (delta.dim() - 1))
        squares = (delta - self.centre.view(*heads, self.dim)).square().sum(-1, keepdim=True)
        factor = -math.sqrt(self.channels) / self.step**2 * self.sharpness  # a few numbers, not a table
        return self._with_rest(factor.view(*heads, 1) * squares, self.rest.offsets(delta))

    def poses(self, relative: Tensor | None = None) -> Tensor | None:
        if self.pose_preference is None:
            return None
        return self._with_rest(math.sqrt(self.channels) * self.pose_preference.unsqueeze(-1), self.rest.poses())

    def _with_rest(self, first: Tensor, rest: Tensor | None) -> Tensor:
        """The first channel, and the others of the encoding.

        A unit query is multiplied by the first and divided by the root of the number of channels.
        """
        if rest is None:
            return F.pad(first, (0, self.channels - 1))
        return torch.cat([first, rest.expand(*first.shape[:-1], -1)], dim=-1)

    def extra_repr(self) -> str:
        parts = [f"sharpness={self.initial_sharpness:g}"] + ([f"content={self.content:g}"] if self.content else [])
        return ", ".join(parts + ([] if self.width is None else [f"width={self.width}, reach={self.reach:g}"]))
