"""The C++ under sanitizers; tests/functional/native/drivers/sanitize.py runs more of it."""

import pytest

from escnn_attention.functional.native import build
from tests.functional.native.drivers import sanitize


@pytest.fixture
def compiler():
    try:
        return build.find_compiler()
    except build.NotBuilt as reason:
        pytest.skip(str(reason))


def built(*arguments):
    try:
        return sanitize.build(*arguments)
    except sanitize.NotSupported as reason:
        pytest.skip(str(reason))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loop", sanitize.LOOPS)
def test_nothing_is_found(compiler, tmp_path, loop):
    done = sanitize.run(built(compiler, "address", loop, tmp_path), every=7)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_buffer_that_is_too_small_is_found(compiler, tmp_path):
    done = sanitize.run(built(compiler, "address", "pair_mlp", tmp_path, "float", "-DMISSING=1"))
    assert done.returncode
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
@pytest.mark.parametrize("loop", sanitize.LOOPS)
@pytest.mark.parametrize("number", ["float", "double"])
def test_nothing_is_found_in_any_mode(compiler, tmp_path, sanitizer, loop, number):
    done = sanitize.run(built(compiler, sanitizer, loop, tmp_path, number, "-O1"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", sanitize.LOOPS)
def test_every_program_finds_a_buffer_that_is_too_small(compiler, tmp_path, loop):
    assert sanitize.run(built(compiler, "address", loop, tmp_path, "float", "-DMISSING=1")).returncode
