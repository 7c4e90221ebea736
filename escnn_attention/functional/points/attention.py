"""The backends of attention between points."""

from __future__ import annotations

from escnn_attention.functional.points import dense, linear, native, portable, reference, triton
from escnn_attention.functional.points.call import PointCall, fold_points
from escnn_attention.functional.registry import Backend, Registry

_portable = Backend(portable.attention, isolates_nonfinite=True, serves_two_sets=True, counts=True)
_native = Backend(
    native.attention,
    native.why_unsupported,
    isolates_nonfinite=True,
    why_not_first=native.why_not_first,
    serves_two_sets=True,
    counts=True,
)

BETWEEN_POINTS: Registry[PointCall] = Registry(
    {
        "native": _native,
        "triton": Backend(
            triton.attention,
            triton.why_unsupported,
            isolates_nonfinite=True,
            why_not_first=triton.why_not_first,
            serves_two_sets=True,
            counts=True,
        ),
        "neighbours": _portable,
        "dense": Backend(dense.attention, dense.why_unsupported, True, folds=False, why_not_first=dense.why_not_first),
        "linear": Backend(
            *(linear.attention, linear.why_unsupported, True),
            folds=False,
            why_not_first=linear.why_not_first,
            counts=True,
        ),
        "reference": Backend(
            reference.attention, isolates_nonfinite=True, folds=False, serves_two_sets=True, counts=True
        ),
    },
    preference=lambda device: ("linear", "dense", "native" if device == "cpu" else "triton", "neighbours"),
    fold=fold_points,
    exported=(
        Backend(linear.exported, linear.why_unsupported, True, folds=False, counts=True),
        Backend(portable.exported, serves_two_sets=True, counts=True),
    ),
    packaged=Backend(native.exported, native.why_unsupported, why_not_first=native.why_not_first, counts=True),
)
"""The backends of attention between points."""
