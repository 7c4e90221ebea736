"""The command line: tables, mistakes in one line, and commands that a signal stops and that go on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from typer.testing import CliRunner

from escnn_attention.training import cli
from escnn_attention.training.cli import app, stoppable
from escnn_attention.training.experiment.checkpoints import read_checkpoint
from escnn_attention.training.modules.classifier import Classifier
from tests.training.experiment.runs import ROOT

TINY = ["compare", "--networks", "cnn", "--group", "c4", "--epochs", "1", "--parameters", "600"]
TINY += ["--limit-train", "50", "--limit-test", "20", "--batch-size", "25", "--accelerator", "cpu"]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # no colours in the middle of words, on CI either

    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], prog_name="escnn-attention")


@pytest.mark.slow
def test_table_and_files(run, tmp_path):
    output = tmp_path / "run"
    result = run(*TINY, "--output", output)
    assert result.exit_code == 0, result.output
    stored = json.loads((output / "results.json").read_text(encoding="utf-8"))
    for network in stored["networks"]:
        for value in (network["accuracy_upright"], network["accuracy_rotated"], network["accuracy_any_angle"]):
            assert f"{100 * value:.1f}" in result.output
        assert f"{network['parameters']:,}" in result.output
    for part in (
        "upright",
        "parameters",
        "equiv.",
        "each test image transformed by 90°; 180°; 270°",
    ):
        assert part in result.output
    assert str(output / "results.csv") in result.output
    # Every option is part of the run.
    told = {"data": "digits", "group": "c4", "networks": "cnn", "epochs": 1, "seed": 0, "limit_train": 50}
    assert stored["configuration"].items() >= told.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TINY, "--data-dir", "."], "error: --data-dir: the digits ship with scikit-learn"),
        ([*TINY, "--data", "rotmnist", "--data-dir", "no/such"], "error: the data folder no/such does not exist"),
        ([*TINY, "--data", "cifar"], "cifar"),
        ([*TINY, "--limit-test", "0"], "error: Invalid value for '--limit-test'"),
        (["compre"], "error: No such command 'compre'. Did you mean 'compare'? (see escnn-attention --help)"),
        (["--nonsense"], "error: No such option: --nonsense"),
        (["export"], "error: Missing argument 'RUN_OR_NAME' (see escnn-attention export --help)"),
        (["fit", "--nonsense", "--folder", "run"], " (see escnn-attention fit --help)"),
        (["test", "--pretrained"], "error: --pretrained: needed a name or a folder"),
        (["test", "--pretrained="], "error: --pretrained: needed a name or a folder"),
        (["test", "--pretrained", "none", "--nonsense"], " (see escnn-attention test --pretrained none --help)"),
    ],
)
def test_mistakes_end_in_one_clear_line(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_that_diverges_has_a_table(run, tmp_path):
    result = run(*TINY, "--output", tmp_path / "run", "--learning-rate", 1e30)
    assert result.exit_code == 0, result.output
    (network,) = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))["networks"]
    assert network["equivariance_error"] is None


def test_threads(run, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for given, expected in (("2", 2), (None, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
            run(*TINY, "--group", "none", "--output", tmp_path)
            assert torch.get_num_threads() == expected
        run(*TINY, "--group", "none", "--output", tmp_path, "--threads", 3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_without_a_command_help_is_shown(run):
    assert "compare" in run().output


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


def run_until(arguments, output, ready):
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


def wait_for(path):
    until = time.monotonic() + 200
    while not path.exists() or not path.read_text().endswith("\n"):
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
        arguments = [*TINY, "--epochs", "2", "--restart", "--output", str(folder)]
    else:
        file = configuration()
        if command != "fit":
            fitted(file, folder)
        arguments = [command, "--config", str(file), "--folder", str(folder)]
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if start == "fork":
        process = fork(run_until, arguments, output, ready)
        process_id, wait = process.pid, lambda: process.join() or process.exitcode
    else:
        code = f"from tests.training.test_cli import run_until; run_until({arguments}, {str(output)!r}, {str(ready)!r})"
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
