import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.data.storage.arrays import check_images, check_labels, npz_file, readable
from escnn_attention.training.errors import UserError


@pytest.mark.parametrize("error", [OSError, KeyError, EOFError, RecursionError, MemoryError, struct.error])
def test_damage_names_the_file(tmp_path, error):
    with (
        pytest.raises(UserError, match=r"cannot read .*file\.bin: .*reason.*move the file away"),
        readable(tmp_path / "file.bin"),
    ):
        raise error("reason")


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(error, match=r"^reason$"), readable(tmp_path / "file.bin"):
        raise error("reason")


def test_objects_are_not_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    np.savez(tmp_path / "file.npz", fine=np.arange(3), trap=np.array([Trap()], dtype=object))
    with npz_file(tmp_path / "file.npz") as arrays:
        assert arrays["fine"].tolist() == [0, 1, 2]
    with pytest.raises(UserError, match="allow_pickle"), npz_file(tmp_path / "file.npz") as arrays:
        arrays["trap"]
    np.save(tmp_path / "file.npy", np.arange(3))
    with pytest.raises(UserError, match="cannot read"), npz_file(tmp_path / "file.npy"):
        pass


def packed(save):
    file = io.BytesIO()
    save(file, images=np.arange(200, dtype=np.uint8).reshape(2, 10, 10), labels=np.array([3, 7]))
    return file.getvalue()


PACKED = {"stored": packed(np.savez), "compressed": packed(np.savez_compressed)}


@pytest.mark.parametrize("kind", PACKED)
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_does_not_matter(tmp_path, kind, data):
    content = bytearray(PACKED[kind])
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "file.npz"
    path.write_bytes(content)
    try:
        with npz_file(path) as arrays:
            found = {name: arrays[name] for name in ("images", "labels")}
    except UserError as error:
        message = str(error)
        ours = message.startswith(f"cannot read {path}: ") and "\n" not in message
    else:
        ours = found["labels"].tolist() == [3, 7] and np.array_equal(found["images"].ravel(), np.arange(200))
    assert ours


def test_labels_come_back_as_int64(tmp_path):
    images = np.zeros((3, 4, 4), np.uint8)
    labels = check_images(tmp_path, "x", images, np.array([0, 9, 1], np.uint8), (4, 4))
    assert (labels.tolist(), labels.dtype) == ([0, 9, 1], np.int64)
    with pytest.raises(UserError, match="y must lie between 0 and 1"):
        check_labels(tmp_path, "y", np.array([0, 2]), 2, num_classes=2)
    with pytest.raises(UserError, match=r"x_images must be uint8 \(N, 4, 5\), found uint8 \(3, 4, 4\)"):
        check_images(tmp_path, "x", images, labels, (4, 5))
