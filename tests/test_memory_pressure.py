"""The cache of decoded chunks shrinks while the machine is short of memory."""

import re

import pytest

from support.image import Image
from support.nbdserver import wait_until

MIB = 1 << 20
SIZE = 96 * MIB
# A part of each chunk: the server keeps the chunks that were read in part.
CHUNK = 16 << 10


def meminfo(available_mib):
    """The kernel's answer on a machine of 2 GiB."""
    return f"MemTotal: {2048 << 10} kB\nMemFree: 0 kB\nMemAvailable: {available_mib << 10} kB\n"


def private_mib(process):
    with open(f"/proc/{process}/status", encoding="utf-8") as status:
        return int(re.search(r"RssAnon:\s+(\d+) kB", status.read())[1]) / 1024


@pytest.fixture
def disk(coldrise, tmp_path):
    image = Image(SIZE)
    image.fill(0, SIZE, 17)
    coldrise.backup("web01", vda=image.save(tmp_path / "disk.raw"))
    return image


def test_the_cache_is_released_while_memory_is_scarce(coldrise, disk, nbdkit, tmp_path):
    kernel = tmp_path / "meminfo"
    kernel.write_text(meminfo(1024), encoding="utf-8")
    see_it = 'mount --bind "$0" /proc/meminfo && exec "$@"'

    def in_own_view(*command):
        return ["unshare", "--mount", "sh", "-c", see_it, kernel, *command]

    server = nbdkit(wrap=in_own_view)
    with server.connect("web01/latest/vda") as handle:
        shrinks_and_grows(server, handle, disk, kernel)


def shrinks_and_grows(server, handle, disk, kernel):
    def read_all():
        for offset in range(0, SIZE, CHUNK):
            assert handle.pread(512, offset) == disk.read(offset, 512)

    read_all()
    full = private_mib(server.process.pid)
    assert full > SIZE / MIB * 0.9
    # In place: the server sees this file, not another one of the same name.
    with open(kernel, "r+", encoding="utf-8") as file:
        file.write(meminfo(32))
        file.truncate()
    wait_until(lambda: private_mib(server.process.pid) < full - 48, "giving memory back")
    # Dropped pages are read again.
    read_all()
    with open(kernel, "r+", encoding="utf-8") as file:
        file.write(meminfo(1024))
        file.truncate()

    def grown():
        read_all()
        return private_mib(server.process.pid) > full - 8

    wait_until(grown, "keeping chunks again")
