"""The measured disks: a real guest, and generated ones with known content.

Generated content comes from a seeded generator, so every run and every machine
measures the same bytes.
"""

from __future__ import annotations

import os
import random
import shutil
import string
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from .commands import preread, run
from .figures import Failure

MIB = 1 << 20
GIB = 1 << 30
EXTENT_BYTES = 64 << 10
_WORD_TABLE = 1 << 16


@dataclass(frozen=True)
class Disk:
    """A raw image. `window_offset_bytes` and `window_bytes` give the part for random and
    sequential loads: the one with the most data, because the cost of a hole differs
    between a raw file and a backup."""

    name: str
    path: Path
    size_bytes: int
    window_offset_bytes: int
    window_bytes: int
    window_density: float

    def text(self) -> str:
        return (
            f"{self.name}: {self.size_bytes / GIB:.3g} GiB, loads at {self.window_offset_bytes / MIB:.0f} MiB "
            f"+ {self.window_bytes / MIB:.0f} MiB, {self.window_density:.0%} of it data"
        )


def _whole(name: str, path: Path) -> Disk:
    size = path.stat().st_size
    return Disk(name, path, size, 0, size, 1.0)


class TextSource:
    """Text-like content: words with the uneven frequencies of a language. zstd -3
    compresses it to about a third."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 11))) for _ in range(8000)]
        # Word number n gets a share of about 1/n of the table (Zipf).
        table: list[str] = []
        for rank, word in enumerate(words, start=1):
            table.extend([word] * max(1, round(_WORD_TABLE / (10 * rank))))
        self._table = (table * (_WORD_TABLE // len(table) + 1))[:_WORD_TABLE]

    def take(self, length_bytes: int) -> bytes:
        picks = array("H", self._rng.randbytes(length_bytes // 2))
        return " ".join(map(self._table.__getitem__, picks)).encode()[:length_bytes]


def half_random_extents(size_bytes: int, seed: int) -> Iterator[bytes]:
    """Extents of 64 KiB, alternately random and text."""
    rng = random.Random(seed)
    text = TextSource(rng)
    for index in range(size_bytes // EXTENT_BYTES):
        yield rng.randbytes(EXTENT_BYTES) if index % 2 else text.take(EXTENT_BYTES)


def _written(path: Path, extents: Iterator[bytes]) -> Path:
    """Writes a file under another name first, so that the next run does not use an
    incomplete image of an interrupted one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb") as stream:
        for extent in extents:
            stream.write(extent)
    unfinished.rename(path)
    return path


def half_random(folder: Path, size_bytes: int) -> Disk:
    path = folder / f"half-random-{size_bytes // MIB}M.raw"
    if not path.exists():
        _written(path, half_random_extents(size_bytes, seed=1))
    preread(path)
    return _whole("half-random", path)


def many_chunks(folder: Path, size_bytes: int, chunk_bytes: int) -> Disk:
    """An image without equal chunks. Each chunk compresses to about a quarter, so many
    chunks take little disk space."""
    path = folder / f"many-chunks-{size_bytes // MIB}M-{chunk_bytes}.raw"
    if not path.exists():
        rng = random.Random(2)
        unique = chunk_bytes // 4
        rest = TextSource(rng).take(chunk_bytes)[: chunk_bytes - unique]
        chunks = (rng.randbytes(unique) + rest for _ in range(size_bytes // chunk_bytes))
        _written(path, chunks)
    preread(path)
    return _whole("many-chunks", path)


def _data_map(path: Path, unit_bytes: int) -> list[int]:
    """Bytes of data in every unit of a sparse file."""
    size = path.stat().st_size
    units = [0] * (-(-size // unit_bytes))
    with open(path, "rb") as stream:
        position = 0
        while position < size:
            try:
                start = os.lseek(stream.fileno(), position, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(stream.fileno(), start, os.SEEK_HOLE)
            position = end
            while start < end:
                stop = min(end, (start // unit_bytes + 1) * unit_bytes)
                units[start // unit_bytes] += stop - start
                start = stop
    return units


def guest(folder: Path, source: Path, window_bytes: int) -> Disk:
    """A copy of a guest's raw image with its holes, and its densest window."""
    if not source.is_file():
        raise Failure(f"{source}: no guest image there")
    path = folder / "guest.raw"
    stamp = folder / "guest.source"
    identity = f"{source.resolve()} {source.stat().st_size} {source.stat().st_mtime_ns}"
    if not path.exists() or not stamp.exists() or stamp.read_text() != identity:
        folder.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        run(["cp", "--sparse=always", source, path])
        stamp.write_text(identity)
    preread(path)
    size = path.stat().st_size
    unit = 16 * MIB
    units = _data_map(path, unit)
    count = max(1, min(window_bytes // unit, len(units)))
    best = max(range(len(units) - count + 1), key=lambda first: sum(units[first : first + count]))
    window = min(count * unit, size - best * unit)
    return Disk("guest", path, size, best * unit, window, sum(units[best : best + count]) / window)


def build_guest(project: Path) -> Path:
    """Builds the project's own guest, or finds it in its cache."""
    lines = run([project / "images" / "guest" / "build.sh"], timeout_s=1800).strip().splitlines()
    if not lines:
        raise Failure("images/guest/build.sh named no image")
    return Path(lines[-1])


def full_copy(disk: Disk, target: Path) -> Path:
    """A raw copy with every block allocated and written."""
    run(["cp", "--sparse=never", disk.path, target])
    preread(target)
    return target


def sparse_copy(disk: Disk, target: Path) -> Path:
    """A raw copy that keeps the holes, in the page cache."""
    run(["cp", "--sparse=always", disk.path, target])
    preread(target)
    return target


def luks_copy(raw: Path, target: Path, passphrase: str) -> Path:
    """A LUKS image (AES-256-XTS, QEMU's defaults) of a raw disk, in the page cache."""
    run(["qemu-img", "convert", "-f", "raw", "-O", "luks", "--object", f"secret,id=key,data={passphrase}",
         "-o", "key-secret=key,iter-time=10", raw, target])
    return target


def zstd_chain(disk: Disk, folder: Path) -> Path:
    """A zstd qcow2 of the disk with an empty overlay, the usual way to serve a qcow2
    backup for writing. Returns the overlay."""
    base = folder / f"{disk.name}-zstd.qcow2"
    overlay = folder / f"{disk.name}-overlay.qcow2"
    run(["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd", disk.path, base])
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", overlay])
    preread(base)
    return overlay


def scattered(size_bytes: int, unit_bytes: int, share: float, seed: int) -> list[int]:
    """Distinct unit-aligned offsets that cover a share of a disk, ascending."""
    units = size_bytes // unit_bytes
    picked = random.Random(seed).sample(range(units), max(1, round(units * share)))
    return [unit * unit_bytes for unit in sorted(picked)]


def stamped(rng: random.Random, length_bytes: int) -> bytes:
    """Content that no earlier call returned: half random, half constant."""
    return struct.pack("<Q", rng.getrandbits(64)) + rng.randbytes(length_bytes // 2 - 8) + bytes(length_bytes // 2)


def removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
