"""The entry point of the command ``escnn-attention``, with a message where its packages are not installed."""

from __future__ import annotations

import sys

from escnn_attention import __version__


def main() -> None:
    """Run the command, whose packages come with the extra ``train``.

    Raises:
        SystemExit: always; without these packages with a message that names the first one.

    Example:
        >>> sys.argv = ["escnn-attention", "--version"]
        >>> try:
        ...     main()
        ... except SystemExit:
        ...     pass
        escnn-attention 0.1.0
    """
    try:
        from escnn_attention.training.cli import main as run
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["--version"]:
            print(f"escnn-attention {__version__}")
            raise SystemExit from error
        raise SystemExit(
            f"escnn-attention: {error.name} is not installed; needed the packages of the extra train:"
            ' pip install "escnn-attention[train]", or pip install -e ".[train]" in a checkout'
        ) from error
    run()
