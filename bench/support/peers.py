"""The peers of a backup and a restore.

Compression is zstd at level 3 everywhere; every program that can encrypt does so. Each
works in its own folder, on one file, and creates a new, empty store every round.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from abc import ABC, abstractmethod
from pathlib import Path

from .coldrise import Coldrise
from .commands import preread, run, spell, stored_bytes, timed
from .figures import Failure


class Tool(ABC):
    """A way to store an image and to restore it. `store` and `restore` return the wall
    time of the timed part, in seconds."""

    name: str
    # Printed with the results.
    store_text: str
    restore_text: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Creates the empty store; not timed."""

    @abstractmethod
    def store(self, image: Path) -> float: ...

    @abstractmethod
    def restore(self, image: Path, target: Path) -> float:
        """Restores `image` from the store to `target`, which does not exist."""

    @property
    def stored(self) -> Path:
        """The path that counts as stored."""
        return self.folder / "store"

    def stored_mib(self) -> float:
        return stored_bytes(self.stored) / (1 << 20)

    def preread(self) -> None:
        preread(self.stored)


class ColdriseTool(Tool):
    name = "coldrise"
    store_text = "coldrise backup disk vda=raw:IMAGE"
    restore_text = "coldrise restore disk/latest/vda TARGET"

    def __init__(self, folder: Path, program: Path, chunk_size: str | None, compression: str) -> None:
        super().__init__(folder)
        self._coldrise = Coldrise(program, self.stored)
        self._init = {"chunk_size": chunk_size, "compression": compression}

    def prepare(self) -> None:
        self._coldrise.init(**self._init)

    def store(self, image: Path) -> float:
        return self._coldrise.call_timed("backup", "disk", f"vda=raw:{image}")

    def restore(self, image: Path, target: Path) -> float:
        return self._coldrise.call_timed("restore", "disk/latest/vda", target)


class Zstd(Tool):
    name = "zstd -3 -T2"
    store_text = "zstd -3 -T2 -o STORE IMAGE"
    restore_text = "zstd -d -o TARGET STORE"

    def store(self, image: Path) -> float:
        return timed(["zstd", "-q", "-3", "-T2", "-o", self.stored, image])

    def restore(self, image: Path, target: Path) -> float:
        return timed(["zstd", "-q", "-d", "-o", target, self.stored])


class Cp(Tool):
    """The reference for a restore; it has no store."""

    name = "cp"
    store_text = ""
    restore_text = "cp IMAGE TARGET"

    def store(self, image: Path) -> float:
        raise Failure("cp stores nothing")

    def restore(self, image: Path, target: Path) -> float:
        return timed(["cp", image, target])


class QemuImg(Tool):
    name = "qemu-img zstd qcow2"
    store_text = "qemu-img convert -c -O qcow2 -o compression_type=zstd IMAGE STORE"
    restore_text = "qemu-img convert -O raw STORE TARGET"

    def store(self, image: Path) -> float:
        return timed(
            ["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"]
            + [image, self.stored]
        )

    def restore(self, image: Path, target: Path) -> float:
        return timed(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", self.stored, target])


class Restic(Tool):
    name = "restic"
    store_text = "restic backup IMAGE (repository version 2, compression auto)"
    restore_text = "restic restore latest --target FOLDER"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._env = {
            "RESTIC_REPOSITORY": str(self.stored),
            "RESTIC_PASSWORD": secrets.token_hex(16),
            "RESTIC_CACHE_DIR": str(folder / "cache"),
        }

    def prepare(self) -> None:
        run(["restic", "-q", "init", "--repository-version", "2"], env=self._env)

    def store(self, image: Path) -> float:
        return timed(["restic", "-q", "backup", image], env=self._env)

    def restore(self, image: Path, target: Path) -> float:
        took_s = timed(["restic", "-q", "restore", "latest", "--target", self.folder / "out"], env=self._env)
        # restic recreates the whole path of the source.
        (self.folder / "out" / image.relative_to("/")).rename(target)
        return took_s


class Borg(Tool):
    name = "borg"
    store_text = "borg create -C zstd,3 STORE::disk IMAGE (repokey-blake2)"
    restore_text = "borg extract STORE::disk"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._env = {
            "BORG_REPO": str(self.stored),
            "BORG_PASSPHRASE": secrets.token_hex(16),
            "BORG_BASE_DIR": str(folder / "base"),
        }

    def prepare(self) -> None:
        run(["borg", "init", "-e", "repokey-blake2"], env=self._env)

    def store(self, image: Path) -> float:
        return timed(["borg", "create", "-C", "zstd,3", "::disk", image.name], env=self._env, cwd=image.parent)

    def restore(self, image: Path, target: Path) -> float:
        out = self.folder / "out"
        out.mkdir()
        took_s = timed(["borg", "extract", "::disk"], env=self._env, cwd=out)
        (out / image.name).rename(target)
        return took_s


_BENJI_CONFIGURATION = """\
configurationVersion: '1'
databaseEngine: sqlite:///{folder}/benji.sqlite
defaultStorage: store
storages:
  - name: store
    storageId: 1
    module: file
    configuration:
      path: {stored}
      activeTransforms: [{transforms}]
ios:
  - name: file
    module: file
transforms:
  - name: zstd
    module: zstd
    configuration: {{level: 3}}
  - name: encryption
    module: aes_256_gcm
    configuration: {{kdfSalt: '{salt}', kdfIterations: 20000, password: '{password}'}}
"""


class Benji(Tool):
    store_text = "benji backup file:IMAGE disk (blocks of 4 MiB, its default)"
    restore_text = "benji restore VERSION file:TARGET"

    def __init__(self, folder: Path, program: Path, is_encrypted: bool) -> None:
        super().__init__(folder)
        self.name = "Benji" if is_encrypted else "Benji, not encrypted"
        self._argv = [program, "--log-level", "ERROR", "-c", folder / "benji.yaml"]
        self._transforms = "zstd, encryption" if is_encrypted else "zstd"

    def prepare(self) -> None:
        self.stored.mkdir()
        (self.folder / "benji.yaml").write_text(
            _BENJI_CONFIGURATION.format(
                folder=self.folder,
                stored=self.stored,
                transforms=self._transforms,
                salt=base64.b64encode(os.urandom(32)).decode(),
                password=secrets.token_hex(16),
            )
        )
        run([*self._argv, "database-init"])

    def store(self, image: Path) -> float:
        return timed([*self._argv, "backup", "-u", "one", f"file:{image}", "disk"])

    def restore(self, image: Path, target: Path) -> float:
        return timed([*self._argv, "restore", "one", f"file:{target}"])


BENJI_VERSION = "0.17.0"


def install_benji(environment: Path, requirements: Path) -> Path:
    """Benji's program in a virtual environment, installed from PyPI if it is missing.
    Raises Failure with pip's message if the installation fails."""
    program = environment / "bin" / "benji"
    stamp = environment / "installed"
    if stamp.exists() and stamp.read_text() == BENJI_VERSION and program.exists():
        return program
    began = time.monotonic()
    pip = [environment / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        run(["/usr/bin/python3", "-m", "venv", "--clear", environment])
        run([*pip, "wheel"])
        run([*pip, "-r", requirements])
        run([*pip, "--no-deps", f"benji=={BENJI_VERSION}"])
        run([program, "--help"])
    except Failure as error:
        raise Failure(
            f"Benji {BENJI_VERSION} cannot be installed from PyPI "
            f"({spell([*pip, '-r', requirements])}, {time.monotonic() - began:.0f} s): {error}"
        ) from error
    stamp.write_text(BENJI_VERSION)
    return program
