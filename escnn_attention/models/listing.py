"""What ``print`` shows of a network."""

from __future__ import annotations

import re

__all__ = ["shortened"]

# A field type as escnn prints it: [C4_on_R2[(None, 4)]: {irrep_0 (x3), regular (x2)}(11)]
_TYPE = re.compile(r"\[[^\[\]{}]*(?:\[[^{}]*\])?: \{([^{}]*)\}\(\d+\)\]")
_FIELDS = re.compile(r"([^{}]+?) \(x(\d+)\)(?:, )?")
_NOTHING = re.compile(
    r"^ *\(\w+\): (?:Identity(?:Module)?\(\)|Crop\([^\n]*margin=0\)|SequentialModule\(\s*\))\n", re.MULTILINE
)
_ALONE = re.compile(r"^( *\(\w+\): )SequentialModule\(\n *\(\w+\): ([^\n]*\))\n *\)$", re.MULTILINE)
_INPLACE = re.compile(r"\(inplace=True, type=")
_DEFAULTS = re.compile(r", (?:stride=1|momentum=0\.1|track_running_stats=True|affine=True|eps=1e-05)\b")


def shortened(text: str) -> str:
    """What PyTorch prints of a module, with field types by their fields, and without what does nothing.

    Example:
        >>> from escnn_attention.models.listing import shortened
        >>> shortened("R2Conv([C4_on_R2[(None, 4)]: {irrep_0 (x3), regular (x2)}(11)], stride=1, bias=False)")
        'R2Conv(3 irrep_0, 2 regular, bias=False)'
    """
    text = _TYPE.sub(lambda found: ", ".join(f"{count} {name}" for name, count in _FIELDS.findall(found[1])), text)
    text = _INPLACE.sub("(", _DEFAULTS.sub("", text))
    while (shorter := _ALONE.sub(r"\1\2", _NOTHING.sub("", text))) != text:
        text = shorter
    return text
