"""Raw disks laid out as images, by formats/examples/lay_out.rs."""

import dataclasses
import json
import pathlib
import subprocess

from support.cli import BUILT

LAY_OUT = BUILT / "examples" / "lay_out"

WRITABLE = [
    "raw", "vhd-fixed", "vhdx-fixed", "vmdk-esxi", "vmdk-hosted", "qcow2-full", "qcow2-external",
]  # fmt: skip
COMPACT = ["vhd", "vhdx", "vmdk", "vmdk-stream", "qcow2"]

QEMU_DRIVERS = {"raw": "raw", "vhd": "vpc", "vhdx": "vhdx", "vmdk": "vmdk", "qcow2": "qcow2"}


class Refused(Exception):
    """No such image is possible; the text says why."""


@dataclasses.dataclass
class Part:
    """One file of an image, with the map of its content."""

    path: pathlib.Path
    size_bytes: int
    segments: list


@dataclasses.dataclass
class Laid:
    """An image of a disk."""

    format: str
    parts: list

    @property
    def path(self):
        """The file that is opened."""
        return self.parts[0].path

    @property
    def data(self):
        """The part that holds the disk."""
        return self.parts[-1]

    @property
    def driver(self):
        """QEMU's name of the format."""
        return QEMU_DRIVERS[self.format.partition("-")[0]]


def lay_out(image_format, raw, folder, sector_bytes=512):
    """The image of `raw` in a new folder."""
    assert LAY_OUT.exists(), "cargo build --release -p coldrise-formats --example lay_out"
    folder.mkdir()
    command = [LAY_OUT, image_format, raw, folder, str(sector_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        assert "panicked" not in done.stderr, done.stderr
        raise Refused(done.stderr)
    files = [json.loads(line) for line in done.stdout.splitlines()]
    parts = [Part(folder / f["name"], f["size_bytes"], f["segments"]) for f in files]
    for part in parts:
        assert part.path.stat().st_size == part.size_bytes
    return Laid(image_format, parts)
