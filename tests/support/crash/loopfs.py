"""An ext4 file system on a loop file, whose power can be cut."""

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import time

# EXT4_IOC_SHUTDOWN, and the mode that writes out neither the page cache nor the journal.
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2

_SYNC_FILE_RANGE_ALL = 7
_libc = ctypes.CDLL(None, use_errno=True)


class LoopFailure(Exception):
    """A command for a loop file system failed."""


def _run(*command):
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LoopFailure(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise LoopFailure(f"{' '.join(words)}: {done.stderr.strip()}")


class LoopFileSystem:
    """Created and mounted immediately; `close` unmounts it."""

    def __init__(self, directory, size_bytes):
        self.image = directory / "power.ext4"
        self.mount_point = directory / "power"
        self.mount_point.mkdir()
        self.is_mounted = False
        with open(self.image, "wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1", self.image)
        self.mount()

    def mount(self):
        _run("mount", "-o", "loop,nodiscard", self.image, self.mount_point)
        self.is_mounted = True

    def cut_power(self):
        """From now on nothing reaches the disk; unsynced data is gone after `power_up`."""
        folder = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(folder)

    def power_up(self):
        """Call it when no process has a file open there."""
        self.unmount()
        if subprocess.check_output(["losetup", "--associated", self.image]):
            # A mount namespace that began meanwhile, of another test's network, still has the file
            # system that was shut down; mounting the same image would show that one again.
            copy = self.image.with_name(f"{self.image.name}+")
            _run("cp", "--sparse=always", self.image, copy)
            self.image = copy
        self.mount()

    def unmount(self):
        # The kernel may need a moment to release a killed process's files.
        for _ in range(200):
            try:
                _run("umount", self.mount_point)
                break
            except LoopFailure as error:
                failure = error
                time.sleep(0.02)
        else:
            raise failure
        self.is_mounted = False

    def write_out_some(self, rng, folder):
        """Writes random pages of the files in a folder to the disk, in any order, as the kernel
        may do at any time."""
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                pages = max(1, size_bytes // 4096)
                for _ in range(rng.choice((0, 5, 60))):
                    start = rng.randrange(pages) * 4096
                    length = rng.choice((1, 1, 2, 16)) * 4096
                    _libc.sync_file_range(
                        file.fileno(),
                        ctypes.c_int64(start),
                        ctypes.c_int64(length),
                        _SYNC_FILE_RANGE_ALL,
                    )

    def fill(self):
        """Takes all free space with one file; returns its path."""
        ballast = self.mount_point / "ballast"
        with open(ballast, "wb") as file:
            at = 0
            piece = 64 << 20
            while piece >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), at, piece)
                    at += piece
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    # It may have got a part; the next, smaller piece starts behind it.
                    at = max(at, os.fstat(file.fileno()).st_size)
                    piece //= 2
        return ballast

    def close(self):
        if self.is_mounted:
            self.unmount()
