"""Commands that a signal stops: exit status, what is kept, and the line that says how to go on."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest

pytest.importorskip("jsonargparse")

from escnn_attention.training import cli
from escnn_attention.training.experiment.checkpoints import read_checkpoint
from escnn_attention.training.modules.classifier import Classifier
from escnn_attention.training.stopping import stoppable
from tests.training.experiment.runs import ROOT
from tests.training.test_cli import TINY

STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
HOOKS = {
    "fit": "on_train_epoch_start",
    "test": "test_step",
    "predict": "predict_step",
    "compare": "on_train_epoch_start",
}
FINISHED = {"fit": 2, "compare": 1}
"""The epochs that are finished when a signal comes."""


@pytest.fixture(autouse=True)
def _interruptible():
    """What is started in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(arguments, output, ready):
    """Run a command that says when it is in the midst of its work, and then takes its time."""
    command = arguments[0]
    hook = getattr(Classifier, HOOKS[command])

    def linger(module, *given):
        if module.current_epoch == FINISHED.get(command, 0):
            with open(ready, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(100)
        return hook(module, *given)

    setattr(Classifier, HOOKS[command], linger)
    sys.argv = ["escnn-attention", *arguments]
    with open(output, "w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        cli.main()


def wait_for(path, lines=1):
    until = time.monotonic() + 200
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(line) for line in path.read_text().splitlines()]


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


CASES = [(command, name) for command in HOOKS for name in STATUS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("command", "number"), CASES)
@pytest.mark.parametrize("start", ["fork", pytest.param("python", marks=pytest.mark.exhaustive)])
def test_a_signal_stops_a_command(configuration, fitted, fork, quick_path, tmp_path, command, number, start):
    folder, output, ready = tmp_path / "a run", tmp_path / "output", tmp_path / "ready"
    if command == "compare":
        arguments = [command, *TINY, "--epochs", "2", "--restart", "--output", str(folder)]
    else:
        file = configuration()
        if command != "fit":
            fitted(file, folder)
        arguments = [command, "--config", str(file), "--folder", str(folder)]
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if start == "fork":
        process = fork(run, arguments, output, ready)
        process_id, wait = process.pid, lambda: process.join() or process.exitcode
    else:
        code = f"from tests.training.test_stopping import run; run({arguments}, {str(output)!r}, {str(ready)!r})"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "PYTHONPATH": quick_path}
        started = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment, cwd=ROOT)
        process_id, wait = started.pid, started.wait
    busy = wait_for(ready)
    os.kill(process_id, number)
    assert wait() == STATUS[number]
    assert not any(map(is_alive, busy))
    (line,) = [line for line in output.read_text(encoding="utf-8").splitlines() if "stopped" in line]
    assert line.startswith(f"stopped by {signal.Signals(number).name}; ")
    assert "Traceback" not in output.read_text(encoding="utf-8")
    goes_on = shlex.split(line[line.index("escnn-attention") :])
    assert goes_on == ["escnn-attention", *(word for word in arguments if word != "--restart")]
    if command in ("test", "predict"):
        assert {path.name for path in folder.iterdir()} == before
        return
    trained = folder / "cnn" if command == "compare" else folder
    assert read_checkpoint(trained / "last.ckpt")["epoch"] + 1 == FINISHED[command]


@pytest.mark.slow
def test_the_command_that_is_told_goes_on(configuration, fork, tmp_path, monkeypatch):
    arguments = ["fit", "--config", str(configuration()), "--folder", str(tmp_path / "run")]
    process = fork(run, arguments, tmp_path / "output", tmp_path / "ready")
    wait_for(tmp_path / "ready")
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    (line,) = [line for line in (tmp_path / "output").read_text().splitlines() if "stopped" in line]
    monkeypatch.setattr(sys, "argv", shlex.split(line[line.index("escnn-attention") :]))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert read_checkpoint(tmp_path / "run" / "last.ckpt")["epoch"] + 1 == 3


def test_a_signal_is_an_interrupt_once():
    """A scheduler sends it to a process and to its group: the second one must not disturb what unwinds."""
    said, unwound = [], []

    def work():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            unwound.append(True)

    with pytest.raises(SystemExit) as ended, stoppable(said.append):
        work()
    assert (ended.value.code, said, unwound) == (143, ["SIGTERM"], [True])


def test_what_becomes_of_an_interrupt():
    """Libraries make other exits of it; a block that ends well in spite of it has done its work."""

    def work(code):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemExit(code) from None

    for code, expected in ((1, 130), ("words", 130), (0, 0), (None, None)):
        with pytest.raises(SystemExit) as ended, stoppable(lambda _: None):
            work(code)
        assert ended.value.code == expected
    with pytest.raises(ZeroDivisionError), stoppable(lambda _: None):  # the control: no signal
        1 / 0  # noqa: B018


def test_handlers_are_as_before():
    before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable(lambda _: None):
            assert signal.getsignal(signal.SIGTERM) != before[0]
            signal.raise_signal(signal.SIGINT)  # which nohup has a process ignore
    finally:
        assert signal.signal(signal.SIGINT, before[1]) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == before[0]
    failed = []

    def elsewhere():
        try:
            with stoppable(lambda _: None):
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failed


def test_other_processes_of_a_training_say_nothing(monkeypatch, capsys):
    from lightning_utilities.core.rank_zero import rank_zero_only

    for rank, words in ((1, ""), (0, "stopped by SIGTERM; this starts again: escnn-attention test --folder x")):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        cli._say_stopped("SIGTERM", ["test", "--folder", "x"])
        assert capsys.readouterr().err.strip() == words
