"""What was measured is kept."""

import json

import pytest

pytest.importorskip("jsonargparse")

from escnn_attention.training.experiment import run_experiment
from tests.training.experiment.runs import SHORT, call


@pytest.mark.slow
def test_results_of_other_measurements_are_kept(configuration, fitted, tmp_path, capsys):
    folder = tmp_path / "run"
    file = configuration(**SHORT)
    fitted(file, folder)
    call("test", file, folder)
    call("predict", file, folder)
    full, predictions = (folder / "test.json").read_bytes(), (folder / "predictions.csv").read_bytes()
    call("test", file, folder)
    call("predict", file, folder)
    assert not list(folder.glob("*.old*"))  # the same again takes its place
    for command in ("test", "predict"):
        call(command, file, folder, "--data.init_args.limit_test", 7)
    assert (folder / "test.old-1.json").read_bytes() == full
    assert (folder / "predictions.old-1.csv").read_bytes() == predictions
    assert len((folder / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 8
    assert "test.json was of another run: it is kept as test.old-1.json" in capsys.readouterr().err
    (folder / "test.json").write_text("my notes", encoding="utf-8")
    call("test", file, folder)
    assert (folder / "test.old-2.json").read_text(encoding="utf-8") == "my notes"


@pytest.mark.slow
def test_a_damaged_last_checkpoint_does_not_keep_the_best_one_from_being_measured(
    configuration, fitted, tmp_path, capsys
):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    for path in (folder, whole):
        fitted(configuration(**SHORT), path)
    content = bytearray((folder / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "last.ckpt").write_bytes(content)
    for path in (folder, whole):
        run_experiment(["test", "--folder", str(path)])
    found, expected = (json.loads((path / "test.json").read_text(encoding="utf-8")) for path in (folder, whole))
    assert {**found, "tested": None} == {**expected, "tested": None}
    said = capsys.readouterr().err
    assert "last.ckpt: it is damaged" in said
    assert "The curve in test.json ends with the epoch that was measured" in said
