"""One hostile image, and the expected result of its import."""

import dataclasses
import pathlib
from collections.abc import Callable

SECRET = b"THE SECRET THAT NOBODY NAMED "


@dataclasses.dataclass(frozen=True)
class Refused:
    """The import fails; the message contains one of the words, in any case."""

    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Harmless:
    """The import gives a disk of that size, zero except for these bytes."""

    size_bytes: int
    stored: dict[int, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder of a case, next to a file that no command names."""

    folder: pathlib.Path
    secret: pathlib.Path

    def write(self, name: str, *parts: tuple[int, bytes], length: int = 0) -> pathlib.Path:
        """Writes a sparse file of these parts, of at least that length."""
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
    attack: str  # the attack
    expected: Refused | Harmless
    make: Callable[[Place], pathlib.Path]  # writes it and returns the file to name
    arguments: tuple[str, ...] = ()

    def write(self, base: pathlib.Path) -> pathlib.Path:
        """Writes the image into base/NAME, and the secret next to it."""
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
