"""The backends of attention between points."""

from __future__ import annotations

from escnn_attention.functional.points import dense, loop, portable, reference
from escnn_attention.functional.points.call import PointCall, fold_points
from escnn_attention.functional.registry import Backend, Registry

_portable = Backend(portable.attention, isolates_nonfinite=True, serves_two_sets=True)
_native = Backend(
    loop.attention,
    loop.why_unsupported,
    isolates_nonfinite=True,
    why_not_first=loop.why_not_first,
    serves_two_sets=True,
)

BETWEEN_POINTS: Registry[PointCall] = Registry(
    {
        "native": _native,
        "neighbours": _portable,
        "dense": Backend(dense.attention, dense.why_unsupported, True, folds=False, why_not_first=dense.why_not_first),
        "reference": Backend(reference.attention, isolates_nonfinite=True, folds=False, serves_two_sets=True),
    },
    preference=lambda device: ("dense", "native", "neighbours"),
    fold=fold_points,
    exported=Backend(portable.exported, serves_two_sets=True),
    packaged=Backend(loop.exported, loop.why_unsupported, why_not_first=loop.why_not_first),
)
"""The backends of attention between points."""
