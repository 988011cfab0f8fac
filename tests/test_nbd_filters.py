"""NBD: the plugin under nbdkit's filters, and with other people's clients."""

import os
import random
import subprocess

import nbd
import pytest

from support.image import Image
from support.nbdserver import read_all, refused

MIB = 1 << 20


def run(*command):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def write_and_check(handle, image, seed):
    """Writes at odd places, and compares the whole disk with its model."""
    choice = random.Random(seed)
    for _ in range(30):
        length = choice.randint(1, 70_000)
        offset = choice.randint(0, len(image) - length)
        data = choice.randbytes(length)
        handle.pwrite(data, offset)
        image.write(offset, data)
        handle.zero(3000, offset - offset % 4096)
        image.zero(offset - offset % 4096, 3000)
    handle.flush()
    assert read_all(handle) == image.content


@pytest.mark.parametrize(
    ("filters", "parameters"),
    [
        (["cache"], ["cache=writeback"]),
        (["cache"], ["cache=writethrough"]),
        (["readahead"], []),
        (["rate"], ["rate=800M"]),
        (["blocksize"], ["minblock=4096", "maxdata=64k"]),
        (["retry"], ["retries=1"]),
        (["readahead", "cache", "retry"], []),
    ],
    ids=lambda value: "+".join(value) or "default",
)
def test_a_session_is_written_through(live, image, filters, parameters, nbdkit):
    # The blocksize filter serves whole blocks only.
    size = len(image) - len(image) % 4096 if "blocksize" in filters else len(image)
    server = nbdkit(*parameters, filters=filters)
    with server.connect(live) as handle:
        assert handle.get_size() == size
        if size == len(image):
            write_and_check(handle, image, 3)
        else:
            handle.pwrite(b"odd" * 1001, 4095)
            image.write(4095, b"odd" * 1001)
            handle.flush()
            assert read_all(handle) == image.content[:size]
    server.stop()
    with nbdkit().connect(live) as handle:
        assert read_all(handle) == image.content


def test_cow_does_not_change_the_point(point, image, nbdkit):
    server = nbdkit(filters=["cow"])
    original = image.read(0, len(image))
    # This filter drops what is less than a block of its own at the end.
    usable = len(image) - len(image) % 4096
    with server.connect(f"{point}/vda") as handle:
        assert not handle.is_read_only()
        handle.pwrite(b"over" * 5000, 4097)
        assert bytes(handle.pread(20000, 4097)) == b"over" * 5000
        assert bytes(handle.pread(MIB, 5 * MIB)) == original[5 * MIB : 6 * MIB]
        assert handle.get_size() in (usable, len(image))
    server.stop()
    with nbdkit().connect(f"{point}/vda") as handle:
        assert read_all(handle) == original


def test_stats_count_the_requests(live, tmp_path, nbdkit):
    statistics = tmp_path / "statistics"
    server = nbdkit(f"statsfile={statistics}", filters=["stats"])
    with server.connect(live) as handle:
        handle.pwrite(b"x" * 4096, 0)
        handle.pread(4096, 0)
        handle.flush()
    server.stop()
    text = statistics.read_text(encoding="utf-8")
    assert "read: 1 ops" in text and "write: 1 ops" in text and "flush: 1 ops" in text


def test_a_partition_of_a_session(coldrise, tmp_path, nbdkit):
    disk = Image(8 * MIB)
    # An MBR with one Linux partition from sector 2048 on, 4 MiB long.
    entry = bytes([0, 0, 0, 0, 0x83, 0, 0, 0])
    entry += (2048).to_bytes(4, "little") + (8192).to_bytes(4, "little")
    disk.write(446, entry)
    disk.write(510, b"\x55\xaa")
    disk.fill(MIB, MIB, "partition")
    point = coldrise.backup("parted", vda=disk.save(tmp_path / "parted.raw"))
    live = coldrise.publish(point, "parted")["vda"]
    server = nbdkit("partition=1", filters=["partition"])
    with server.connect(live) as handle:
        assert handle.get_size() == 4 * MIB
        assert bytes(handle.pread(MIB, 0)) == disk.read(MIB, MIB)
        handle.pwrite(b"inside", 3 * MIB)
    server.stop()
    with nbdkit().connect(live) as handle:
        assert bytes(handle.pread(6, 4 * MIB)) == b"inside"


def test_a_disk_without_partitions_is_refused_by_that_filter(live, nbdkit):
    server = nbdkit("partition=1", filters=["partition"])
    refused(server, live)
    assert "partition" in server.messages()


def test_exportname_renames(live, image, nbdkit):
    server = nbdkit(
        f"default-export={live}", "exportname-list=keep", filters=["exportname"]
    )
    with server.connect("") as handle:
        write_and_check(handle, image, 4)


def test_protect_keeps_a_range(live, image, nbdkit):
    server = nbdkit("protect=0-4095", filters=["protect"])
    with server.connect(live) as handle:
        handle.pwrite(b"x" * 4096, 4096)
        with pytest.raises(nbd.Error):
            handle.pwrite(b"y" * 512, 0)
        assert bytes(handle.pread(512, 0)) == image.read(0, 512)
        assert bytes(handle.pread(4096, 4096)) == b"x" * 4096


def test_ip_admits_only_listed_addresses(live, image, nbdkit):
    uid = os.getuid()
    server = nbdkit(f"allow=uid:{uid}", "deny=all", filters=["ip"])
    with server.connect(live) as handle:
        write_and_check(handle, image, 6)
    refused(nbdkit("deny=all", filters=["ip"]), live)


def test_nbdcopy_and_qemu_read_a_point(point, image, tmp_path, nbdkit):
    uri = nbdkit().uri(f"{point}/vda")
    run("nbdcopy", "--connections=4", uri, tmp_path / "copied.raw")
    assert (tmp_path / "copied.raw").read_bytes() == image.content
    assert (tmp_path / "copied.raw").stat().st_blocks * 512 < 4 * MIB, "holes were copied"
    run("qemu-img", "convert", "-f", "raw", "-O", "raw", uri, tmp_path / "converted.raw")
    assert (tmp_path / "converted.raw").read_bytes() == image.content
    assert "vda" in run("nbdinfo", "--no-content", uri)


def test_nbdcopy_and_qemu_write_a_session(live, image, tmp_path, nbdkit):
    server = nbdkit()
    uri = server.uri(live)
    out = run(
        "qemu-io", "-f", "raw", uri,
        "-c", "write -P 0x5a 4096 65536",
        "-c", "write -z 1M 64k",
        "-c", "discard 0 4096",
        "-c", "write -f -P 0x33 2M 512",
        "-c", "flush",
        "-c", "read -P 0x5a 4096 61440",
        "-c", "read -P 0 0 4096",
        "-c", "read -P 0x33 2M 512",
    )  # fmt: skip
    assert "failed" not in out and "error" not in out
    new = Image(len(image))
    new.fill(123_456, 2 * MIB, "copied in")
    run("nbdcopy", "--connections=4", "--flush", new.save(tmp_path / "new.raw"), uri)
    with server.connect(live) as handle:
        assert read_all(handle) == new.content
