"""A guest that works between backups: a part of a real disk changes through its own
file system, with real content.

Half of the changes replace files by others, as upgrades and users do. The other half
rewrites pages of 8 KiB in place inside one large file, as a database does. The new
content comes from files of this machine's own installation that the guest does not
have, in an order that depends only on their names.
"""

from __future__ import annotations

import hashlib
import os
import random
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from .commands import run
from .figures import Failure
from .images import MIB

_PARTITION_OFFSET_BYTES = MIB
PAGE_BYTES = 8 << 10
_PIECE_BYTES = MIB
_POOL_FOLDERS = ("/usr/lib", "/usr/share", "/usr/bin")
_BLOCK_BYTES = 4 << 10
# A larger file would dominate a day's changes.
_LARGEST_BYTES = 4 * MIB


class Pool:
    """Real content that the guest does not have yet; each byte is used once."""

    def __init__(self, guest_names: set[str]) -> None:
        found: list[tuple[bytes, Path]] = []
        for folder in _POOL_FOLDERS:
            for path in Path(folder).rglob("*"):
                if not path.is_symlink() and path.is_file() and path.name not in guest_names:
                    if _BLOCK_BYTES <= path.stat().st_size <= _LARGEST_BYTES:
                        found.append((hashlib.sha256(os.fsencode(path)).digest(), path))
        self._paths = [path for _, path in sorted(found)]
        self._rest = bytearray()

    def file(self) -> tuple[str, bytes]:
        """A whole file: its name and content."""
        if not self._paths:
            raise Failure(f"{', '.join(_POOL_FOLDERS)} hold too little to change a guest with")
        path = self._paths.pop()
        return path.name, path.read_bytes()

    def take(self, length_bytes: int) -> bytes:
        """The next bytes of the pool, across files."""
        while len(self._rest) < length_bytes:
            self._rest += self.file()[1]
        taken = bytes(self._rest[:length_bytes])
        del self._rest[:length_bytes]
        return taken


class WorkingGuest:
    """A raw image whose file system changes day by day. Mounting it needs root."""

    def __init__(self, image: Path, mount_point: Path) -> None:
        if os.geteuid() != 0:
            raise Failure("changing a guest's files mounts its disk: run as root")
        self.image = image
        self._mount_point = mount_point
        self._day = 0
        with self._mounted() as root:
            self._pool = Pool({path.name for path in root.rglob("*")})
            self.data_bytes = _data_bytes(root)

    @contextmanager
    def _mounted(self) -> Iterator[Path]:
        self._mount_point.mkdir(exist_ok=True)
        options = f"loop,offset={_PARTITION_OFFSET_BYTES}"
        run(["mount", "-o", options, self.image, self._mount_point])
        try:
            yield self._mount_point
            # Freed blocks become holes again, as on a hypervisor's disk.
            run(["fstrim", self._mount_point])
        finally:
            run(["umount", self._mount_point])

    def add_database(self, size_bytes: int) -> None:
        """Adds the file whose pages change."""
        with self._mounted() as root:
            with open(root / "var" / "lib" / "database", "wb") as stream:
                for _ in range(size_bytes // _PIECE_BYTES):
                    stream.write(self._pool.take(_PIECE_BYTES))
            self.data_bytes = _data_bytes(root)

    def work(self, share: float, pages_share: float) -> int:
        """Changes `share` of the data; `pages_share` of that are pages of the database.
        Returns the number of bytes written."""
        self._day += 1
        changed = share * self.data_bytes
        with self._mounted() as root:
            pages = self._rewrite_pages(root, round(changed * pages_share))
            return pages + self._replace_files(root, changed * (1 - pages_share))

    def _rewrite_pages(self, root: Path, length_bytes: int) -> int:
        if length_bytes == 0:
            return 0
        path = root / "var" / "lib" / "database"
        pages = random.Random(self._day).sample(
            range(path.stat().st_size // PAGE_BYTES), length_bytes // PAGE_BYTES
        )
        with open(path, "r+b") as stream:
            for page in pages:
                stream.seek(page * PAGE_BYTES)
                stream.write(self._pool.take(PAGE_BYTES))
        return len(pages) * PAGE_BYTES

    def _replace_files(self, root: Path, length_bytes: float) -> int:
        """Removes files chosen at random, and writes new ones into their folders."""
        files = sorted(
            path for folder in ("usr", "opt") for path in (root / folder).rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size >= _BLOCK_BYTES
        )
        random.Random(1000 + self._day).shuffle(files)
        removed, folders = 0, []
        while removed < length_bytes and files:
            path = files.pop()
            removed += path.stat().st_size
            folders.append(path.parent)
            path.unlink()
        written = 0
        while written < removed:
            name, content = self._pool.file()
            # Always using the same folder would be unrealistic.
            folder = folders[written % len(folders)]
            (folder / f"{self._day}-{name}").write_bytes(content)
            written += len(content)
        return written


def _data_bytes(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
