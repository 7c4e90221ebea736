"""The command where its packages are, and where they are not."""

import sys

import pytest

from escnn_attention import __version__


@pytest.mark.parametrize("arguments", [["--version"], ["fit", "--help"]])
def test_without_the_extra(monkeypatch, capsys, arguments):
    from escnn_attention.training.entry import main

    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "escnn_attention.training.cli", raising=False)
    monkeypatch.setattr(sys, "argv", ["escnn-attention", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    if arguments == ["--version"]:
        assert not ended.value.code
        assert capsys.readouterr().out.strip() == f"escnn-attention {__version__}"
    else:
        message = "escnn-attention: typer is not installed; needed the packages of the extra train"
        assert str(ended.value.code).startswith(message)


def test_with_it(monkeypatch, capsys):
    from escnn_attention.training.entry import main

    monkeypatch.setattr(sys, "argv", ["escnn-attention", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == f"escnn-attention {__version__}"
