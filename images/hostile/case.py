"""One hostile image, and what has to become of it."""

import dataclasses
import pathlib
from collections.abc import Callable

SECRET = b"THE SECRET THAT NOBODY NAMED "


@dataclasses.dataclass(frozen=True)
class Refused:
    """It is not imported; the message holds one of the words, whatever their case."""

    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Harmless:
    """It is imported as a disk of that size, zero but for these bytes."""

    size_bytes: int
    stored: dict[int, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a case is written: a folder of its own, beside a file that nobody names."""

    folder: pathlib.Path
    secret: pathlib.Path

    def write(self, name: str, *parts: tuple[int, bytes], length: int = 0) -> pathlib.Path:
        """A sparse file of these parts, of that length at least."""
        path = self.folder / name
        with open(path, "wb") as file:
            for offset, part in parts:
                file.seek(offset)
                file.write(part)
            end = max([length, *(offset + len(part) for offset, part in parts)])
            file.truncate(end)
        return path


@dataclasses.dataclass(frozen=True)
class Case:
    """A hostile image."""

    name: str
    word: str  # the format, as `coldrise backup` takes it
    attack: str  # what it tries
    expected: Refused | Harmless
    make: Callable[[Place], pathlib.Path]  # writes it; the file to name
    arguments: tuple[str, ...] = ()

    def write(self, base: pathlib.Path) -> pathlib.Path:
        """Writes the image into base/NAME, and the secret beside it."""
        secret = base / "secret"
        if not secret.exists():
            secret.write_bytes(SECRET * 40000)
        folder = base / self.name
        folder.mkdir()
        return self.make(Place(folder, secret))


def refused(*words: str) -> Refused:
    return Refused(words)


def cut(path: pathlib.Path, length: int) -> pathlib.Path:
    """The same file, truncated."""
    with open(path, "r+b") as file:
        file.truncate(length)
    return path
