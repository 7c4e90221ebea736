import io
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.digest import append_digest, has_changed


def written(content):
    file = io.BytesIO()
    torch.save(content, file)
    append_digest(file)
    return file.getvalue()


WRITTEN = written({"weights": torch.arange(100.0), "epoch": 3})


def test_other_readers_see_no_difference():
    assert not has_changed(io.BytesIO(WRITTEN))
    assert torch.equal(torch.load(io.BytesIO(WRITTEN), weights_only=True)["weights"], torch.arange(100.0))
    with zipfile.ZipFile(io.BytesIO(WRITTEN)) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"sha256:")


@given(st.integers(0, 8 * len(WRITTEN) - 1))
def test_every_bit_counts(bit):
    flipped = bytearray(WRITTEN)
    flipped[bit // 8] ^= 1 << bit % 8
    assert has_changed(io.BytesIO(flipped))


@pytest.mark.parametrize("start", [0, len(WRITTEN) - 120])
def test_every_bit_at_the_ends_counts(start):
    for bit in range(8 * start, 8 * (start + 120)):
        test_every_bit_counts.hypothesis.inner_test(bit)


@given(st.integers(4, len(WRITTEN) - 1))
def test_every_byte_counts(length):
    assert has_changed(io.BytesIO(WRITTEN[:length]))


def test_without_a_digest_a_file_is_taken_as_it_is():
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"weights": torch.arange(100.0)}, file, _use_new_zipfile_serialization=zipped)
        assert not has_changed(file)
    for content in (b"", b"PK", b"hello", b"sha256:"):
        assert not has_changed(io.BytesIO(content))
