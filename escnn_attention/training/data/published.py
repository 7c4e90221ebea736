"""What the data modules of all published data sets have in common, whatever their batches hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from escnn_attention.training.data.files import ENVIRONMENT, data_folder
from escnn_attention.training.data.parts import DataInParts, Source
from escnn_attention.training.errors import UserError


class PublishedData(DataInParts, ABC):
    """Data in three parts that is read from published files in a folder.

    Attributes:
        folder: the folder to look in, and to download into; None for the one of the environment or of the user.
        download: whether to download what the folder lacks.
    """

    files: ClassVar[str]
    """The files that are looked for, for people."""

    folder: Path | None
    download: bool

    @abstractmethod
    def _prepare_folder(self, folder: Path) -> None:
        """Download what ``folder`` lacks if :attr:`download` allows it, and unpack what cannot be read packed."""

    @abstractmethod
    def _read(self, folder: Path, parts: Mapping[str, int | None]) -> Mapping[str, Source] | None:
        """The parts asked for, at least the first so many of each, or ``None`` where the folder lacks a file."""

    def _prepare(self) -> None:
        self._prepare_folder(self._folder())

    def _load(self, parts: Mapping[str, int | None]) -> Mapping[str, Source]:
        folder = self._folder()
        sources = self._read(folder, parts)
        if sources is None:
            raise UserError(
                f"{folder} does not hold {self.files}: copy it there, name another folder with `folder` or the"
                f" environment variable {ENVIRONMENT}, or leave `download` at true and call prepare_data()"
            )
        return sources

    def _folder(self) -> Path:
        return data_folder(self.folder, self.files)
