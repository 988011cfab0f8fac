"""Readers of disk images that others wrote: QEMU, libyal, Dissect.

Each opens an image and answers with its size and the bytes of a range.
"""

import json
import subprocess
import sys

from support.cli import ROOT

# Programs that the Makefile installs only for the tests.
sys.path.insert(1, str(ROOT / "build" / "python"))

# pylint: disable=wrong-import-position
import pyqcow  # noqa: E402
import pyvhdi  # noqa: E402
import pyvmdk  # noqa: E402
from dissect.hypervisor.disk.qcow2 import QCow2  # noqa: E402
from dissect.hypervisor.disk.vhd import VHD  # noqa: E402
from dissect.hypervisor.disk.vhdx import VHDX  # noqa: E402
from dissect.hypervisor.disk.vmdk import VMDK  # noqa: E402


def qemu(*arguments, timeout_s=300):
    """The output of a QEMU program, which must succeed."""
    command = [str(argument) for argument in arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


class Qemu:
    """qemu-img."""

    def __init__(self, image):
        self.image = image
        found = json.loads(
            qemu("qemu-img", "info", "--output=json", "-f", image.driver, image.path)
        )
        self.size_bytes = found["virtual-size"]
        self.details = found.get("format-specific", {}).get("data", {})

    def check(self):
        """QEMU's check finds no error, if it can check the format."""
        if self.image.driver in ("vhdx", "vmdk", "qcow2"):
            qemu("qemu-img", "check", "-f", self.image.driver, self.image.path)

    def compare(self, raw):
        """The image has the content of the raw disk, and zeroes behind it."""
        qemu("qemu-img", "compare", "-f", "raw", "-F", self.image.driver, raw, self.image.path)

    def map(self):
        """The map of the image: dictionaries with start, length, data and offset."""
        command = ["qemu-img", "map", "--output=json", "-f", self.image.driver, self.image.path]
        return json.loads(qemu(*command))

    def read(self, offset, length):
        """Whole sectors."""
        target = self.image.path.parent / "part"
        qemu("qemu-img", "dd", "-f", self.image.driver, "-O", "raw", "bs=512",
             f"skip={offset // 512}", f"count={-(-(offset + length) // 512)}",
             f"if={self.image.path}", f"of={target}")  # fmt: skip
        return target.read_bytes()[:length]


class Libyal:
    """libvhdi, libvmdk and libqcow."""

    def __init__(self, image):
        path = str(image.path)
        if image.driver in ("vpc", "vhdx"):
            self.opened = pyvhdi.file()
            self.opened.open(path)
        elif image.driver == "vmdk":
            self.opened = pyvmdk.handle()
            self.opened.open(path)
            self.opened.open_extent_data_files()
        else:
            self.opened = pyqcow.file()
            self.opened.open(path)
        self.size_bytes = self.opened.get_media_size()

    def read(self, offset, length):
        """Any range."""
        return self.opened.read_buffer_at_offset(length, offset)


class Dissect:
    """dissect.hypervisor."""

    def __init__(self, image):
        if image.driver == "vpc":
            self.opened = VHD(open(image.path, "rb"))
        elif image.driver == "vhdx":
            self.opened = VHDX(image.path)
        elif image.driver == "vmdk":
            self.opened = VMDK(image.path)
        elif len(image.parts) == 2:
            self.opened = QCow2(image.path, data_file=open(image.data.path, "rb")).open()
        else:
            self.opened = QCow2(image.path).open()
        self.size_bytes = self.opened.size

    def read(self, offset, length):
        """A range from a sector on."""
        if isinstance(self.opened, VMDK):
            # Its stream reads ahead, over the end of the last extent.
            return self.opened.read_sectors(offset // 512, -(-length // 512))[:length]
        self.opened.seek(offset)
        # It does not pad the last sector of an external data file.
        end = min(offset + length, self.size_bytes)
        return self.opened.read(length).ljust(end - offset, b"\0")
