"""Runs other programs: timed, checked, and always ended."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Mapping, Sequence

from .figures import Failure

_libc = ctypes.CDLL(None, use_errno=True)

# Bytes of a failed program's output in the message.
_ERROR_TAIL_CHARS = 1500


def spell(argv: Sequence[object]) -> str:
    return shlex.join(str(word) for word in argv)


def run(
    argv: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
    timeout_s: float = 3600,
) -> str:
    """Runs a program to its end and returns its standard output. Raises Failure with the
    tail of its errors if it fails or takes longer than `timeout_s`."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=b"" if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise Failure(f"{words[0]}: not installed ({error})") from error
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{spell(words)}: not done after {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).decode(errors="replace").strip()[-_ERROR_TAIL_CHARS:]
        raise Failure(f"{spell(words)}: exit {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")


def timed(argv: Sequence[object], **options) -> float:
    """Wall time of `run`, in seconds."""
    began = time.monotonic()
    run(argv, **options)
    return time.monotonic() - began


def aead_cat(project: Path) -> Path:
    """The example program of the store, built with the features of the whole workspace as `make test` does."""
    said = run(["cargo", "build", "--release", "--locked", "--workspace", "--example", "aead_cat", "--message-format", "json"],
               cwd=project)
    built = [line["executable"] for line in map(json.loads, said.splitlines()) if line.get("executable")]
    if not built:
        raise Failure("cargo built no aead_cat")
    return Path(built[-1])


def settle(path: Path) -> float:
    """Writes back dirty pages of the file system of `path`, so that a contestant does
    not pay for the writeback of the previous one. Returns the seconds it took."""
    began = time.monotonic()
    fd = os.open(path, os.O_RDONLY)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs {path}")
    finally:
        os.close(fd)
    return time.monotonic() - began


def preread(path: Path) -> None:
    """Reads a file, or every file under a folder, into the page cache."""
    files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    window = bytearray(4 << 20)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(window):
                pass


def stored_bytes(path: Path) -> int:
    """Bytes that a file or a whole folder occupies on the disk."""
    if path.is_file():
        return path.stat().st_blocks * 512
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())
