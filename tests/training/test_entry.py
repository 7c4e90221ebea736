"""The command where its packages are, and where they are not."""

import subprocess
import sys

import pytest

from escnn_attention import __version__

LACKING = """
import sys
sys.modules["{name}"] = None
sys.argv = ["escnn-attention", *{arguments}]
from escnn_attention.training.entry import main
main()
"""


@pytest.mark.parametrize("arguments", [["--version"], ["fit", "--help"]])
def test_without_the_extra(arguments):
    code = LACKING.format(name="typer", arguments=arguments)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    if arguments == ["--version"]:
        assert (done.returncode, done.stdout.strip()) == (0, f"escnn-attention {__version__}")
    else:
        assert done.returncode == 1
        assert "escnn-attention: typer is not installed; needed the packages of the extra train" in done.stderr
        assert "Traceback" not in done.stderr


def test_with_it(monkeypatch, capsys):
    from escnn_attention.training.entry import main

    monkeypatch.setattr(sys, "argv", ["escnn-attention", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == f"escnn-attention {__version__}"
