"""The command where its packages are, and where they are not."""

import sys

import pytest

from escnn_attention import __version__
from escnn_attention.training.entry import main


@pytest.mark.parametrize(("installed", "arguments"), [(True, "--version"), (False, "--version"), (False, "fit --help")])
def test_with_and_without_the_extra(monkeypatch, capsys, installed, arguments):
    if not installed:
        monkeypatch.setitem(sys.modules, "typer", None)
        monkeypatch.delitem(sys.modules, "escnn_attention.training.cli", raising=False)
    monkeypatch.setattr(sys, "argv", ["escnn-attention", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    if arguments == "--version":
        assert not ended.value.code
        assert capsys.readouterr().out.strip() == f"escnn-attention {__version__}"
    else:
        message = "escnn-attention: typer is not installed; needed the packages of the extra train"
        assert str(ended.value.code).startswith(message)
