"""The checks of arguments."""

import re

import numpy as np
import pytest

from escnn_attention import _checks as checks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (checks.check_bool("x", False), False),
        (checks.check_int("x", 3), 3),
        (checks.check_int("x", 0, least=0), 0),
        (checks.check_ints("x", [1, 2], 2, "one for each axis"), (1, 2)),
        (checks.check_sequence("x", [1, "a"], "of anything"), [1, "a"]),
        (checks.check_option("x", "a", iter("ab")), "a"),
        (checks.check_probability("x", 0), 0.0),
        (checks.check_length("x", 2), 2.0),
        (checks.check_unused("x", 1, 1, "nothing uses it"), None),
        (checks.check_grid((1, 2)), None),
        (checks.check_grid(()), None),
    ],
)
def test_what_is_needed_comes_back(given, expected):
    assert given == expected
    assert type(given) is type(expected)


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        ("bool", (1,), TypeError, "got 1, needed True or False"),
        ("int", (2.0,), TypeError, "got 2.0, needed an integer"),
        ("int", (True,), TypeError, "got True, needed an integer"),
        ("int", (np.int64(2),), TypeError, f"got {np.int64(2)!r}, needed int(2)"),
        ("int", (0,), ValueError, "got 0, needed at least 1"),
        ("ints", ([1], 2, "one for each axis"), ValueError, "got 1 values, needed 2, one for each axis"),
        ("ints", ([1, "2"], 2, "one for each axis"), TypeError, "got '2', needed an integer"),
        ("sequence", ("ab", "of names"), TypeError, "got 'ab', needed a list or a tuple, of names"),
        ("option", ("c", "ab"), ValueError, "got 'c', needed one of 'a', 'b'"),
        ("probability", (1.0,), ValueError, "got 1.0, needed a probability in [0, 1)"),
        ("probability", (False,), ValueError, "got False, needed a probability in [0, 1)"),
        ("length", (0,), ValueError, "got 0, needed a positive length"),
        ("length", (float("nan"),), ValueError, "got nan, needed a positive length"),
        ("length", (True,), ValueError, "got True, needed a positive length"),
        ("unused", (2, 1, "nothing uses it"), ValueError, "got 2, but nothing uses it; leave it at 1"),
    ],
)
def test_what_is_not_is_named(check, arguments, error, message):
    with pytest.raises(error, match=re.escape(f"x: {message}")):
        getattr(checks, f"check_{check}")("x", *arguments)
