"""Addresses of time marks: what takes them, and what a command leaves behind."""

import struct

import pytest

from support.nbdserver import wait_until

BLOCK = 4096
MIB = 1 << 20
# xor ax,ax; mov ds,ax; mov si,0x7c16; …: prints the text to the serial port (see test_check_boot).
LOGIN = bytes.fromhex("fc31c08ed8be167cbaf803ac84c07403eeebf8f4ebfd") + b"web01 login: \0"


def content(number):
    return struct.pack("<Q", number) * (BLOCK // 8)


@pytest.fixture
def marked(coldrise, nbdkit, tmp_path):
    """A session with two disks that was written, marked, and written again; its mark and the writer's server."""
    disks = {}
    for name in ["vda", "vdb"]:
        disks[name] = tmp_path / f"{name}.raw"
        disks[name].write_bytes((LOGIN.ljust(510, b"\0") + b"\x55\xaa").ljust(MIB, b"\0"))
    exports = coldrise.publish(coldrise.backup("web01", **disks), "trial")
    server = nbdkit()
    with server.connect(exports["vda"]) as disk:
        disk.pwrite(content(1), BLOCK)
        [mark] = wait_until(lambda: coldrise.json("marks", "trial")["marks"], "a mark")
        disk.pwrite(content(2), BLOCK)
        disk.flush()
    return mark, server


@pytest.mark.parametrize("reading", ["restore", "seal"])
def test_writes_after_a_mark_that_was_used_are_in_the_last_point(coldrise, marked, tmp_path, reading):
    mark, server = marked
    if reading == "restore":
        coldrise.json("restore", f"{mark['address']}/vda", tmp_path / "restored.raw")
    else:
        coldrise.json("seal", mark["address"])
    server.stop()
    # Nothing was captured since: all writes are in a sealed layer, and the point shows only some of them.
    coldrise.json("unpublish", "trial")
    coldrise.json("restore", "--force", "web01/latest/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes()[BLOCK:][:BLOCK] == content(2)
