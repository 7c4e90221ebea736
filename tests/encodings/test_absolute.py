"""The encoding of the positions themselves."""

from tests.encodings.cases import NAMES


def test_absolute_is_told_from_relative():
    assert [cls().absolute for cls in NAMES.values()] == [False, False, False, True, False]
