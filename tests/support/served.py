"""Disks of restore points as image files, served over NBD."""

import subprocess

from support.layouts import QEMU_DRIVERS, Laid, Part

# What a point serves of disk vda, as the file that is opened and, for the pairs,
# the one beside it that holds the data.
SINGLE = [
    "vda.raw",
    "vda.vhd",
    "vda.dynamic.vhd",
    "vda.vhdx",
    "vda.dynamic.vhdx",
    "vda.sparse.vmdk",
    "vda.qcow2",
    "vda.sparse.qcow2",
]
PAIRS = {
    "vda.vmdk": "vda-flat.vmdk",
    "vda.hosted.vmdk": "vda-flat.vmdk",
    "vda.external.qcow2": "vda.raw",
}
FILES = sorted({*SINGLE, *PAIRS, *PAIRS.values()})


def driver_of(file):
    """QEMU's name for the format of a file."""
    return QEMU_DRIVERS[file.rpartition(".")[2]]


def node(server, export, prefix=""):
    """QEMU's options for the bytes of an export."""
    options = {"driver": "nbd", "server.type": "unix", "server.path": server.socket,
               "export": export}  # fmt: skip
    return ",".join(f"{prefix}{name}={value}" for name, value in options.items())


def image_node(server, point, file):
    """QEMU's options for an image that it reads over NBD."""
    options = f"driver={driver_of(file)},{node(server, f'{point}/{file}', 'file.')}"
    if file in PAIRS:
        options += "," + node(server, f"{point}/{PAIRS[file]}", "data-file.")
    return options


def copy(server, point, file, folder):
    """Copies an image with its data file into a new folder, holes as holes."""
    folder.mkdir()
    parts = []
    for name in [file, *([PAIRS[file]] if file in PAIRS else [])]:
        path = folder / name
        done = subprocess.run(["nbdcopy", server.uri(f"{point}/{name}"), path],
                              capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        parts.append(Part(path, path.stat().st_size, []))
    return Laid(file.rpartition(".")[2], parts)
