import hashlib
import multiprocessing
import os
import re
import socket
import threading
import time

import pytest

from escnn_attention.training.data.storage import download as module
from escnn_attention.training.data.storage.download import download
from escnn_attention.training.errors import UserError

MEBIBYTE = 1 << 20
WAY_OUT = "Carry the file here."


@pytest.fixture
def content():
    """4 MiB and a bit."""
    return b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(4 * MEBIBYTE // 32 + 3))


@pytest.fixture
def fetch(server, content, tmp_path):
    """Download ``content``, from wherever the server has it."""
    url, md5 = server.put("data.bin", content)

    def call(path=tmp_path / "data.bin", md5=md5, **options):
        download(url, path, md5, way_out=WAY_OUT, **options)
        return path.read_bytes()

    return call


def test_a_file_comes_whole(fetch, server, content, tmp_path):
    seen = []
    assert fetch(progress=lambda *progress: seen.append(progress)) == content
    assert seen[-1] == (len(content), len(content))
    assert [received for received, _ in seen] == sorted({received for received, _ in seen})
    assert os.listdir(tmp_path) == ["data.bin"]
    assert server.requests == [(None, None)]


def test_a_file_that_is_there_is_left_alone(fetch, server, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"mine")
    assert fetch() == b"mine"
    assert server.requests == []


def test_a_broken_transfer_is_taken_up_where_it_broke_off(fetch, server, content, trick):
    server.answers = [trick(cut=MEBIBYTE), trick(cut=MEBIBYTE)]
    assert fetch() == content
    tag = f'"{hashlib.md5(content).hexdigest()}"'
    assert server.requests == [(None, None), (f"bytes={MEBIBYTE}-", tag), (f"bytes={2 * MEBIBYTE}-", tag)]
    assert server.sent == len(content)


def test_many_breaks_are_fine_as_long_as_something_new_comes(fetch, server, content, trick):
    server.always = trick(cut=MEBIBYTE // 4)
    assert fetch() == content
    assert len(server.requests) > 3 * module._TRIES


def test_a_server_without_ranges_is_asked_for_everything_again(fetch, server, content, trick):
    server.answers = [trick(cut=MEBIBYTE), trick(ranges=False)]
    assert fetch() == content
    assert server.sent == MEBIBYTE + len(content)


@pytest.mark.parametrize("tag", ["etag", "date"])
def test_parts_of_two_versions_are_never_joined(fetch, server, content, tmp_path, trick, tag):
    new = content[::-1] + b"."
    server.put("data.bin", new)
    server.answers = [trick(cut=MEBIBYTE, tag=tag, wait=lambda: server.put("data.bin", content))]
    assert fetch() == content
    assert server.requests[1][0] == f"bytes={MEBIBYTE}-"
    assert server.requests[1][1].startswith('"' if tag == "etag" else "Mon")
    assert server.sent == MEBIBYTE + len(content)
    assert os.listdir(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("tag", ["weak", ""])
def test_without_a_tag_the_checksum_finds_joined_versions(fetch, server, content, tmp_path, trick, tag):
    server.put("data.bin", content[::-1])
    server.answers = [trick(cut=MEBIBYTE, tag=tag, wait=lambda: server.put("data.bin", content))]
    with pytest.raises(UserError, match="not the expected file"):
        fetch()
    assert server.requests[1] == (f"bytes={MEBIBYTE}-", None)
    assert os.listdir(tmp_path) == []
    assert fetch() == content


def test_another_range_than_asked_for_is_not_used(fetch, server, content, trick):
    server.answers = [trick(cut=MEBIBYTE), trick(wrong_start=True)]
    assert fetch() == content
    assert server.requests[2] == (None, None)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="a fresh process takes long to start")
def test_a_killed_download_goes_on(fetch, server, content, tmp_path, trick):
    release = threading.Event()
    server.answers = [trick(cut=2 * MEBIBYTE + 5, wait=release.wait)]
    process = multiprocessing.get_context("fork").Process(target=fetch)
    process.start()
    part = tmp_path / "data.bin.part"
    try:
        deadline = time.monotonic() + 100
        while not part.exists() or part.stat().st_size < 2 * MEBIBYTE:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
        release.set()
    arrived = part.stat().st_size
    assert not (tmp_path / "data.bin").exists()
    seen = []
    assert fetch(progress=lambda *progress: seen.append(progress)) == content
    assert server.requests[1][0] == f"bytes={arrived}-"
    assert seen[0][0] > arrived
    assert os.listdir(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("after", [MEBIBYTE // 2, 2 * MEBIBYTE])
def test_a_stopped_download_leaves_what_is_worth_it(fetch, server, content, tmp_path, after):
    def stop(received, _):
        if received >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(progress=stop)
    if after < MEBIBYTE:
        assert os.listdir(tmp_path) == []
    else:
        assert set(os.listdir(tmp_path)) == {"data.bin.part", "data.bin.part.tag"}
    assert fetch() == content
    assert (server.requests[1][0] is None) == (after < MEBIBYTE)
    assert os.listdir(tmp_path) == ["data.bin"]


def test_a_part_that_is_whole_is_only_checked(fetch, server, content, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(content)  # as if killed before it was renamed
    assert fetch() == content
    assert server.sent == 0


def test_a_part_that_is_too_long_is_dropped(fetch, server, content, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(content + b"more")
    assert fetch() == content
    assert server.sent == len(content)


def test_wrong_checksum(fetch, server, content, tmp_path):
    with pytest.raises(UserError) as caught:
        fetch(md5=32 * "0")
    for part in ("data.bin", hashlib.md5(content).hexdigest(), 32 * "0", "removed", WAY_OUT):
        assert part in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_damaged_part_is_removed(fetch, content, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(b"x" * 2 * MEBIBYTE)
    with pytest.raises(UserError, match="not the expected file"):
        fetch()
    assert os.listdir(tmp_path) == []
    assert fetch() == content


def test_a_transfer_that_never_gets_further(fetch, server, tmp_path, trick):
    server.always = trick(cut=2 * MEBIBYTE, ranges=False)
    with pytest.raises(UserError, match=rf"{module._TRIES} times in a row: it broke off after .*{re.escape(WAY_OUT)}"):
        fetch()
    assert len(server.requests) == module._TRIES
    assert not (tmp_path / "data.bin").exists()


def test_pauses_grow(fetch, server, trick, monkeypatch):
    pauses = []
    monkeypatch.setattr(module, "_PAUSE", 1.0)
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    server.always = trick(status=503)
    with pytest.raises(UserError, match="the server answers 503"):
        fetch()
    assert pauses == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_in_passing_trouble_is_asked_again(fetch, server, content, trick, status):
    server.answers = [trick(status=status)]
    assert fetch() == content


@pytest.mark.parametrize("status", [403, 404, 410])
def test_an_address_that_is_gone_is_not_asked_again(fetch, server, tmp_path, trick, status):
    server.always = trick(status=status)
    with pytest.raises(UserError, match=rf"answers {status}.*{re.escape(WAY_OUT)}"):
        fetch()
    assert len(server.requests) == 1
    assert os.listdir(tmp_path) == []


def test_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module.time, "sleep", lambda _: pytest.fail("no reason to wait"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/data.bin"
        with pytest.raises(UserError, match=rf"cannot download {url}: .*refused.*offline.*{re.escape(WAY_OUT)}"):
            download(url, tmp_path / "data.bin", "", way_out=WAY_OUT)
    assert os.listdir(tmp_path) == []


def test_offline_keeps_what_there_is(fetch, server, content, tmp_path, monkeypatch):
    (tmp_path / "data.bin.part").write_bytes(content[: 2 * MEBIBYTE])

    def refuse(*_, **__):
        raise ConnectionRefusedError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(module.urllib.request, "urlopen", refuse)
        with pytest.raises(UserError, match="offline"):
            fetch()
    assert fetch() == content
    assert server.sent == len(content) - 2 * MEBIBYTE


def test_a_folder_that_is_not_there(fetch, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*data\.bin: No such file"):
        fetch(path=tmp_path / "nowhere" / "data.bin")


def test_of_several_processes_one_downloads(fetch, server, content, tmp_path):
    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "data.bin").read_bytes() == content
    assert len(server.requests) == 1
    assert os.listdir(tmp_path) == ["data.bin"]
