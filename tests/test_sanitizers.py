"""The C++ under sanitizers; tests/functional/native/drivers/sanitize.py runs more of it."""

import pytest

from tests.functional.native.drivers import sanitize

MODES = 41  # of so many modes one; prime, so that every option is met both ways


def built(*arguments):
    try:
        return sanitize.build(*arguments)
    except sanitize.NotSupported as reason:
        pytest.skip(str(reason))


def check(program, every=1, first=0):
    done = sanitize.run(program, every, first)
    assert done.returncode == 0, done.stdout + done.stderr
    if program.name.startswith("address"):
        spoiled = sanitize.run(program, every, first, missing=1)
        assert spoiled.returncode
        assert "heap-buffer-overflow" in spoiled.stderr


@pytest.mark.sampled(1, of="loops that are compiled anew")
@pytest.mark.parametrize("loop", sanitize.LOOPS)
def test_nothing_is_found_but_a_buffer_that_is_too_small(compiler, tmp_path, loop, request):
    """In the part of the modes whose turn it is."""
    check(built(compiler, "address", loop, tmp_path), MODES, request.config.option.hypothesis_seed % MODES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", sanitize.SANITIZERS)
@pytest.mark.parametrize("loop", sanitize.LOOPS)
@pytest.mark.parametrize("number", ["float", "double"])
def test_nothing_else_is_found_in_any_mode(compiler, tmp_path, sanitizer, loop, number):
    check(built(compiler, sanitizer, loop, tmp_path, number, "-O1"))
