"""Keeps seven faults of escnn away from whoever imports :mod:`escnn_attention`.

escnn 1.0.11 imports lie_learn, which there is not for NumPy 2, nor after Python 3.12:
:mod:`~escnn_attention._escnn.lie_learn` stands in for it.

It solves for kernel bases with scikit-learn's ``randomized_svd`` whenever scikit-learn can be imported, and hands it a
:class:`numpy.matrix`. Recent releases of scikit-learn refuse that type, so the first kernel basis that is not yet in
escnn's cache on disk raises ``TypeError: np.matrix is not supported``; bases that are cached hide the fault. Without
scikit-learn escnn uses scipy's singular value decomposition, which is exact, deterministic and accepts the matrix.
:func:`apply` selects that path always.

Where it reads irreps of the octahedral and icosahedral groups, which it keeps on disk, it prints a line for each of
them.

And it reads Clebsch-Gordan coefficients from its cache on disk wherever it needs one, hundreds of times for a
convolution of regular fields, which is most of the time that this takes to be built. Here each is read once.

A product of groups, such as the full octahedral one, makes and checks all of its elements each time that it is asked
for them or for their number, as layers do for each of their fields. Here it makes them once.

``SequentialModule.export`` is documented to return a module in eval mode, and its root is in training mode. Exports of
convolutions and of poolings leave out an option: ``padding_mode``, ``output_padding`` or ``ceil_mode``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from joblib.memory import MemorizedFunc

from escnn_attention._escnn.lie_learn import import_escnn


def apply() -> None:
    """Import escnn, with or without lie_learn, and let it compute its bases with scipy, quietly, and remember them.

    Called when :mod:`escnn_attention` is imported; calling it again changes nothing.
    """
    with warnings.catch_warnings():
        # escnn warns at import that py3nj, which only the Clebsch-Gordan coefficients of SO(3) would use, is missing:
        # no finite group needs them, and the documented installation leaves py3nj out on purpose.
        warnings.filterwarnings("ignore", message=".*py3nj.*")
        import_escnn()
    from escnn.group import _clebsh_gordan, _numerical
    from escnn.group.directproduct import DirectProductGroup
    from escnn.group.groups import ico, octa

    _numerical.randomized_svd = None
    for module in (ico, octa):
        for kept in vars(module).values():
            if isinstance(kept, MemorizedFunc):
                kept._verbose = 0
    coefficients = _clebsh_gordan._clebsh_gordan_tensor
    if isinstance(coefficients, MemorizedFunc):
        _clebsh_gordan._clebsh_gordan_tensor = _remembered(coefficients)
    elements = DirectProductGroup.elements.fget
    if not hasattr(elements, "__wrapped__"):
        DirectProductGroup.elements = property(_made_once(elements))
    from escnn import nn
    from escnn.nn.modules.pooling.pointwise_max import _PointwiseMaxPoolND

    left_out: dict[Any, tuple[str, ...]] = {
        nn.SequentialModule: (),
        _PointwiseMaxPoolND: ("ceil_mode",),
        **dict.fromkeys((nn.R2Conv, nn.R3Conv), ("padding_mode",)),
        **dict.fromkeys((nn.R2ConvTransposed, nn.R3ConvTransposed), ("output_padding",)),
    }
    for kind, names in left_out.items():
        if not hasattr(kind.export, "__wrapped__"):
            kind.export = _complete(kind.export, names)


def _complete(export: Callable[[Any], Any], names: tuple[str, ...]) -> Callable[[Any], Any]:
    """The method ``export`` of a module, whose result is in eval mode and has the options of these names."""

    @functools.wraps(export)
    def exported(self: Any) -> Any:
        plain = export(self).eval()
        for name in names:
            setattr(plain, name, getattr(self, name))
        return plain

    return exported


def _made_once(elements: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The elements of a group, kept with it."""

    @functools.wraps(elements)
    def made_once(group: Any) -> Any:
        if not hasattr(group, "_elements"):  # as groups that keep theirs name them
            group._elements = elements(group)
        return group._elements

    return made_once


def _remembered(kept: Callable[..., Any]) -> Callable[..., Any]:
    """An array of a function, kept in memory, and so for reading only."""

    @functools.cache
    @functools.wraps(kept)
    def remembered(*arguments: Any, **named: Any) -> Any:
        array = kept(*arguments, **named)
        array.flags.writeable = False
        return array

    return remembered
