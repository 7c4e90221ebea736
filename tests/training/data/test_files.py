import hashlib
import io
import multiprocessing
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escnn_attention.training.data.clouds import modelnet40, qm9
from escnn_attention.training.data.files import (
    Published,
    check_array,
    check_labels,
    data_folder,
    download,
    make_from_downloads,
    npz_file,
    readable,
)
from escnn_attention.training.data.images import cifar10, mnist, patch_camelyon
from escnn_attention.training.errors import UserError

PUBLISHED = {
    "ModelNet40": (modelnet40.URL, [modelnet40.MD5]),
    "CIFAR10": (cifar10.URL, [cifar10.MD5]),
    "MNIST": (mnist.URL, [md5 for _, md5 in mnist.ARCHIVES.values()]),
    "RotMNIST": (mnist.ROTATED.url, [mnist.ROTATED.md5]),
    "PatchCamelyon": (patch_camelyon.URL, list(patch_camelyon.MD5.values())),
    **{f"QM9, {file.name}": (file.url, [file.md5]) for file in qm9.DOWNLOADS},
}


@pytest.mark.parametrize(("url", "sums"), PUBLISHED.values(), ids=PUBLISHED)
def test_addresses_and_checksums_of_published_files(url, sums):
    assert url.startswith("https://")
    assert "python" not in url  # the pickled CIFAR-10
    assert len(set(sums)) == len(sums)
    assert {len(bytes.fromhex(md5)) for md5 in sums} == {16}


def names(folder):
    """The files of a folder without hidden ones, such as those of locks."""
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path))
    assert data_folder(None, "x") == tmp_path
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none .*x\.npz .*--data-dir.*ESCNN"):
        data_folder(None, "x.npz")


@pytest.mark.parametrize("value", [None, ""])
def test_the_cache_is_made(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ESCNN_ATTENTION_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("ESCNN_ATTENTION_DATA", value)
    assert not (tmp_path / "cache").exists()
    assert data_folder(None, "x") == tmp_path / "cache" / "escnn-attention"
    assert (tmp_path / "cache" / "escnn-attention").is_dir()


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("ESCNN_ATTENTION_DATA", raising=False)
    with pytest.raises(UserError, match=r"cannot make .*--data-dir"):
        data_folder(None, "x")


def test_the_home_folder_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert data_folder(Path("~/data"), "x") == tmp_path / "data"
    monkeypatch.setenv("ESCNN_ATTENTION_DATA", "~/data")
    assert data_folder(None, "x") == tmp_path / "data"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="does not exist"):
        data_folder(tmp_path / "file", "x")


@pytest.mark.parametrize("error", [OSError, KeyError, EOFError, RecursionError, MemoryError, struct.error])
def test_damage_names_the_file(tmp_path, error):
    with (
        pytest.raises(UserError, match=r"cannot read .*file\.bin: .*reason"),
        readable(tmp_path / "file.bin"),
    ):
        raise error("reason")


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(error, match=r"^reason$"), readable(tmp_path / "file.bin"):
        raise error("reason")


def test_a_single_array_is_no_archive(tmp_path):
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
    labels = check_labels(tmp_path, "x", np.array([0, 9, 1], np.uint8), 3)
    assert (labels.tolist(), labels.dtype) == ([0, 9, 1], np.int64)
    with pytest.raises(UserError, match=r"y .*between 0 and 1"):
        check_labels(tmp_path, "y", np.array([0, 2]), 2, num_classes=2)


@pytest.mark.parametrize(
    ("dtype", "kind", "shape", "needed"),
    [
        ("u1", "uint8", ("N", 4, 5), r"uint8 \(N, 4, 5\)"),
        ("u1", "uint8", ("N", 4), r"uint8 \(N, 4\)"),
        ("u2", "uint8", ("N", 4, 4), "uint8"),
        ("f4", "integers", (3, 4, 4), "integers"),
        ("i8", "floats", ("N", 4, 4), "floats"),
    ],
)
def test_arrays_of_another_kind_or_shape(tmp_path, dtype, kind, shape, needed):
    with pytest.raises(UserError, match=rf"x must be {needed}.*found .* \(3, 4, 4\)"):
        check_array(tmp_path, "x", np.zeros((3, 4, 4), dtype), kind, *shape)
    right = {"uint8": ("u1",), "integers": ("u1", "i8"), "floats": ("f4", ">f8")}
    for each in right[kind]:
        check_array(tmp_path, "x", np.zeros((3, 4, 4), each), kind, "N", 4, 4)


@pytest.fixture
def content():
    """Half a MiB and a bit."""
    return b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(16_387))


@pytest.fixture
def published(server, content):
    return Published("data.bin", *server.put("data.bin", content))


def fetch(published, folder):
    return download(published, folder, "data.bin").read_bytes()


def test_a_file_is_downloaded_once(published, server, content, tmp_path):
    assert fetch(published, tmp_path) == fetch(published, tmp_path) == content
    assert names(tmp_path) == ["data.bin"]
    assert server.requests == ["data.bin"]


@pytest.mark.parametrize("trouble", [503, "cut"])
def test_a_failed_transfer_is_repeated(published, server, content, tmp_path, trouble):
    server.answers = [trouble, trouble]
    assert fetch(published, tmp_path) == content
    assert len(server.requests) == 3


@pytest.mark.parametrize("trouble", [404, 503, "cut"])
def test_a_transfer_that_keeps_failing(published, server, tmp_path, trouble):
    server.answers = 3 * [trouble]
    with pytest.raises(UserError, match=rf"download {published.url}: .*data\.bin"):
        fetch(published, tmp_path)
    assert names(tmp_path) == []


def test_wrong_checksum(published, content, tmp_path):
    with pytest.raises(UserError) as caught:
        fetch(published._replace(md5=32 * "0"), tmp_path)
    for part in ("data.bin", hashlib.md5(content).hexdigest(), 32 * "0", "--data-dir"):
        assert part in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a fresh process takes long to start")
def test_a_killed_download_is_in_nobodys_way(published, server, content, tmp_path):
    context = multiprocessing.get_context("fork")
    server.answers = ["wait"]
    process = context.Process(target=fetch, args=(published, tmp_path))
    process.start()
    try:
        assert server.waiting.wait(20)
    finally:
        process.kill()
        process.join()
        server.release.set()
    assert list(tmp_path.glob(".data.bin.part/*"))
    assert fetch(published, tmp_path) == content
    assert names(tmp_path) == ["data.bin"]
    assert not (tmp_path / ".data.bin.part").exists()


def test_of_several_processes_one_downloads(published, server, content, tmp_path):
    threads = [threading.Thread(target=fetch, args=(published, tmp_path)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "data.bin").read_bytes() == content
    assert len(server.requests) == 1


def write_reversed(file, source):
    content = source.read_bytes()
    assert content, "it is empty"
    file.write(content[::-1])


def test_a_file_is_made_from_downloads(published, server, content, tmp_path):
    made = tmp_path / "made.bin"
    make_from_downloads(made, [published], write_reversed, allowed=False)
    assert names(tmp_path) == []
    for _ in range(2):
        make_from_downloads(made, [published], write_reversed)
    assert made.read_bytes() == content[::-1]
    assert names(tmp_path) == ["made.bin"]
    assert len(server.requests) == 1


def test_what_was_there_stays(published, server, content, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"data\.bin: it is empty"):
        make_from_downloads(tmp_path / "made.bin", [published], write_reversed)
    (tmp_path / "data.bin").write_bytes(b"ab")
    make_from_downloads(tmp_path / "made.bin", [published], write_reversed, allowed=False)
    assert names(tmp_path) == ["data.bin", "made.bin"]
    assert server.requests == []
