"""A training that is killed at any operation on its files goes on to the same end, and leaves nothing behind."""

import csv
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")

from escnn_attention.training.experiment import run_experiment
from escnn_attention.training.experiment.checkpoints import read_checkpoint

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "shutil.rmtree"}
EPOCHS = 3
CONFIGURATION = {
    "seed_everything": 3,
    "trainer": {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    },
    "model": {
        "network": {
            "class_path": "escnn_attention.models.GSANet",
            "init_args": {
                "gspace": {"class_path": "escnn.gspaces.rot2dOnR2", "init_args": {"N": 4}},
                "in_channels": 1,
                "num_classes": 10,
                "channels": 2,
                "blocks": [1],
                "crops": [1],
                "pool": [True],
                "num_heads": 1,
                "kernel_size": 3,
                "query": "own",
                "encoding": "mlp",
            },
        },
        "schedule": "cosine",
    },
    "data": {
        "class_path": "escnn_attention.training.Digits",
        "init_args": {"batch_size": 8, "limit_train": 24, "limit_valid": 40, "eval_batch_size": 40},
    },
}


def fit(folder, kill_at=None):
    """Train in ``folder``; killed before an operation on a file in it, counted from 1. Returns how many there were."""
    operations = 0

    def count(*_):
        nonlocal operations
        operations += 1
        if operations == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event, arguments):
        if event in EVENTS and str(arguments[0]).startswith(str(folder)):
            count()

    sync = os.fsync
    os.fsync = lambda descriptor: (count(), sync(descriptor))
    sys.addaudithook(watch)
    run_experiment(["fit", "--config", str(folder.parent / "experiment.yaml"), "--folder", str(folder)])
    return operations


def in_a_process_of_its_own(folder, kill_at=None):
    """What :func:`fit` returns, or minus the signal that ended it."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            os.write(writer, str(fit(folder, kill_at)).encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as said:
        operations = said.read()
    _, status = os.waitpid(child, 0)
    return int(operations) if operations else -os.WTERMSIG(status)


def end(folder):
    """What is left of a training: weights, rows without times, names of files."""
    with (folder / "epochs.csv").open(encoding="utf-8") as file:
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "memory")} for row in csv.DictReader(file)]
    checkpoints = {name: read_checkpoint(folder / name) for name in ("last.ckpt", "best.ckpt")}
    weights = {f"{name} {k}": v for name, content in checkpoints.items() for k, v in content["state_dict"].items()}
    return weights, rows, sorted(path.name for path in folder.iterdir())


def finished(folder):
    """The epochs that are safe; every checkpoint that is there is whole."""
    epochs = {path.name: read_checkpoint(path)["epoch"] + 1 for path in folder.glob("*.ckpt")}
    return epochs.get("last.ckpt", 0)


def main(folder, seed, sample):
    """Kill trainings, and say what is wrong afterwards."""
    torch.set_num_threads(1)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(CONFIGURATION), encoding="utf-8")
    run_experiment(["fit", "--config", str(folder / "experiment.yaml"), "--folder", str(folder / "warm")])
    operations = in_a_process_of_its_own(folder / "whole")
    weights, rows, names = end(folder / "whole")
    points = range(1, operations + 1)
    wrong, seen = [], []
    for point in points if sample is None else sorted(random.Random(seed).sample(points, sample)):
        run = folder / f"killed-{point}"
        if (ended := in_a_process_of_its_own(run, point)) != -signal.SIGKILL:
            wrong.append(f"{point}: not killed, {ended}")
            continue
        seen.append(finished(run) if run.exists() else 0)
        if in_a_process_of_its_own(run) < 1:
            wrong.append(f"{point}: does not go on")
            continue
        found, found_rows, found_names = end(run)
        if found.keys() != weights.keys() or not all(torch.equal(found[name], weights[name]) for name in weights):
            wrong.append(f"{point}: other weights")
        if found_rows != rows:
            wrong.append(f"{point}: other rows")
        if found_names != names:
            wrong.append(f"{point}: other files, {found_names}")
    print("FOUND", json.dumps({"operations": operations, "wrong": wrong, "finished": seen}))


_RUN = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_folder
{{}}
test_folder.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None)
"""


def killed(start_python, folder, seed=0, sample=None, before="pass"):
    """What :func:`main` finds in a fresh process, in which ``before`` has run."""
    process = start_python(_RUN.format(before), folder, seed, sample or 0)
    output, errors = process.communicate(timeout=900)
    assert "FOUND" in output, errors
    found = json.loads(output.rpartition("FOUND ")[2])
    assert found["operations"] > 4 * EPOCHS
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_some_operations(start_python, tmp_path, pytestconfig):
    """At others in every run; the seed is in the header."""
    found = killed(start_python, tmp_path, pytestconfig.option.hypothesis_seed, sample=3)
    assert found["wrong"] == []
    assert len(found["finished"]) == 3


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_operation(start_python, tmp_path):
    found = killed(start_python, tmp_path)
    assert found["wrong"] == []
    assert set(found["finished"]) == set(range(EPOCHS + 1))


_CARELESS = """
from escnn_attention.training.experiment import command
command.remove_temporaries = lambda *_: None
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_is_left_behind_is_found(start_python, tmp_path):
    """The control."""
    wrong = killed(start_python, tmp_path, before=_CARELESS)["wrong"]
    assert wrong
    assert all("other files" in line for line in wrong)
