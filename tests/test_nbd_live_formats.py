"""NBD: a session's disks as writable image files."""

import pathlib
import random
import subprocess

import nbd
import pytest

from support.nbdserver import block_status, read_all, refused
from support.readers import qemu
from support.served import PAIRS, SINGLE, driver_of, image_node

KIB, MIB = 1 << 10, 1 << 20

WRITABLE = [file for file in SINGLE if ".dynamic" not in file and ".sparse" not in file]
COMPACT = [file for file in SINGLE if file not in WRITABLE]
FILES = sorted({*WRITABLE, *PAIRS, *PAIRS.values()})
# QEMU looks for the data of a flat VMDK next to the descriptor, which NBD does not have.
OVER_NBD = [*WRITABLE, "vda.external.qcow2"]


def content_of(server, export):
    with server.connect(export) as handle:
        return read_all(handle)


def qemu_io(image, commands):
    """Opens, writes, closes: all commands in one run."""
    done = subprocess.run(["qemu-io", "--image-opts", image], input="\n".join([*commands, "q"]),
                          capture_output=True, text=True, check=False, timeout=300)  # fmt: skip
    assert done.returncode == 0 and "failed" not in done.stdout + done.stderr, done.stdout


def random_writes(image, seed, count):
    """Writes of all sizes, and zeroes that cover no whole cluster of 2 MiB."""
    chooser = random.Random(seed)
    for number in range(count):
        length = chooser.choice([512, 512, 4 * KIB, 4 * KIB, 12 * KIB, 60 * KIB])
        offset = chooser.randrange((len(image) - length) // 512 + 1) * 512
        if chooser.random() < 0.1:
            image.zero(offset, length)
            yield f"write -z {offset} {length}"
        else:
            byte = chooser.randrange(1, 256)
            image.write(offset, bytes([byte]) * length)
            yield f"write -P {byte} {offset} {length}"
        if number % 100 == 0:
            yield "flush"


def same_everywhere(server, folder, image, tmp_path, images=OVER_NBD):
    """Every image shows the disk, to QEMU, and every data file is it."""
    assert content_of(server, f"{folder}/vda") == image.content
    raw = image.save(tmp_path / "expected.raw")
    for file in images:
        qemu("qemu-img", "compare", "--image-opts", f"driver=raw,file.filename={raw}",
             image_node(server, folder, file))  # fmt: skip
        if driver_of(file) in ("vhdx", "qcow2"):
            qemu("qemu-img", "check", "--image-opts", image_node(server, folder, file))
    assert content_of(server, f"{folder}/vda-flat.vmdk") == image.content


@pytest.mark.parametrize("file", OVER_NBD)
def test_qemu_writes_to_one_image_are_visible_in_all_others(
    coldrise, live, image, nbdkit, tmp_path, file
):
    with nbdkit() as server:
        qemu_io(image_node(server, "live/trial", file), random_writes(image, file, 1_000))
        same_everywhere(server, "live/trial", image, tmp_path)
        # The file is opened again, and the session continues.
        qemu_io(image_node(server, "live/trial", file), random_writes(image, "again", 50))
    with nbdkit() as server:
        same_everywhere(server, "live/trial", image, tmp_path)
    sealed = coldrise.json("seal", "trial")["address"]
    same_everywhere(nbdkit(), sealed, image, tmp_path, [*OVER_NBD, *COMPACT])
    coldrise.json("restore", f"{sealed}/vda", tmp_path / "restored.raw")
    assert (tmp_path / "restored.raw").read_bytes() == image.content


def kept_place(server, file):
    """A byte of a file that is not the disk's and may be written: its offset."""
    with server.connect(f"live/trial/{file}") as handle:
        size = handle.get_size()
    return {"vda.vhd": size - 60, "vda.vhdx": 3 * 64 * KIB - 512, "vda.qcow2": 512,
            "vda.external.qcow2": 512, "vda.vmdk": 0, "vda.hosted.vmdk": 0}[file]  # fmt: skip


KEPT = ["vda.vhd", "vda.vhdx", "vda.qcow2", "vda.external.qcow2", "vda.vmdk", "vda.hosted.vmdk"]


@pytest.mark.parametrize("file", KEPT)
def test_writes_outside_the_disk_stay_in_their_file(
    coldrise, live, image, nbdkit, tmp_path, file
):
    name = f"live/trial/{file}"
    server = nbdkit()
    place = kept_place(server, file)
    before = {other: content_of(server, f"live/trial/{other}") for other in FILES}
    with server.connect(name) as handle:
        handle.pwrite(b"kept", place)
        handle.flush()
        server.kill()
    expected = before[file][:place] + b"kept" + before[file][place + 4 :]

    # A kill takes nothing that was flushed, a seal nothing at all.
    server = nbdkit()
    assert content_of(server, name) == expected
    with server.connect(name) as handle:
        sealed = coldrise.json("seal", "trial")["address"]
        assert read_all(handle) == expected
    server.stop()
    server = nbdkit()
    for other in FILES:
        assert content_of(server, f"live/trial/{other}") == (
            expected if other == file else before[other]
        ), other
    # It is in no point, and in no other session.
    assert b"kept" not in content_of(server, f"{sealed}/{file}")
    coldrise.publish(sealed, "second")
    assert b"kept" not in content_of(server, f"live/second/{file}")
    server.stop()

    # Nor in the next session of the name.
    coldrise.json("unpublish", "trial", "--discard")
    assert not list((coldrise.repository / "live").glob("*/side/*"))
    coldrise.publish(sealed, "trial")
    again = content_of(nbdkit(), name)
    assert b"kept" not in again and len(again) == len(before[file])
    if "qcow2" not in file:
        assert again != before[file], "it has ids of its own"


def test_a_reader_sees_the_writers_data(live, nbdkit):
    writer, reader = nbdkit(), nbdkit(options=["-r"])
    name = "live/trial/vda.vhd"
    with reader.connect(name) as reading:
        assert reading.is_read_only()
        place = reading.get_size() - 60
        pristine = reading.pread(60, place)
        # No writer; a writer that has kept nothing; the first that is kept; more.
        with writer.connect(live) as handle:
            handle.pwrite(b"disk", 4096)
            assert reading.pread(60, place) == pristine
            assert reading.pread(4, 4096) == b"disk"
        with writer.connect(name) as handle:
            assert reading.pread(60, place) == pristine
            for word in (b"one.", b"two."):
                handle.pwrite(word, place)
                assert reading.pread(4, place) == word
        writer.stop()
        assert reading.pread(60, place) == b"two." + pristine[4:]
        # A reader that opens now, and one while a new writer has the file closed.
        assert content_of(nbdkit(options=["-r"]), name)[place:] == b"two." + pristine[4:]
        with nbdkit().connect(live) as handle:
            handle.pwrite(b"more", 0)
            assert reading.pread(60, place) == b"two." + pristine[4:]


def test_readers_keep_flushed_data_of_a_killed_writer(live, nbdkit):
    name = "live/trial/vda.vhd"
    server, reader = nbdkit(), nbdkit(options=["-r"])
    with server.connect(name) as handle, reader.connect(name) as reading:
        place = handle.get_size() - 60
        handle.pwrite(b"kept", place)
        handle.flush()
        assert reading.pread(4, place) == b"kept"
        server.kill()
        assert reading.pread(4, place) == b"kept"
        # The next writer opens the session and not yet the file.
        with nbdkit().connect(live) as disk:
            disk.pwrite(b"disk", 0)
            assert reading.pread(4, place) == b"kept"


def table_of(file, content):
    """Where the first entry for the disk's first bytes is."""
    if file == "vda.vhdx":
        # The region table, 192 KiB; its entries are 32 bytes: GUID, offset, length.
        entries = [content[192 * KIB + 16 + 32 * i :][:32] for i in (0, 1)]
        (bat,) = [entry for entry in entries if entry.startswith(bytes.fromhex("6677c22d"))]
        return int.from_bytes(bat[16:24], "little")
    first_level = int.from_bytes(content[40:48], "big")
    return int.from_bytes(content[first_level:][:8], "big") & ~(1 << 63)


@pytest.mark.parametrize("file", ["vda.vhdx", "vda.qcow2"])
def test_a_table_rejects_another_location_of_the_disk(live, nbdkit, file):
    server = nbdkit()
    with server.connect(f"live/trial/{file}") as handle:
        content = read_all(handle)
        table = table_of(file, content)
        assert any(content[table : table + 8])
        # Repeating the same write is not a change.
        handle.pwrite(content[table : table + 64], table)
        # Part of the request could be written: the bytes before a VHDX's table.
        for offset, bytes_written in [(table, bytes(8)), (table + 8, b"\1" * 8),
                                      (table - 16, b"x" * 32)]:  # fmt: skip
            with pytest.raises(nbd.Error):
                handle.pwrite(bytes_written, offset)
        with pytest.raises(nbd.Error):
            handle.zero(4 * KIB, table)
        handle.trim(4 * KIB, table)
        assert read_all(handle) == content
    assert "table of the image" in server.messages()


def test_a_guest_that_discards_needs_the_external_qcow2(live, image, nbdkit, tmp_path):
    """QEMU answers whole clusters of zeroes in its tables: refused in the one, done
    to the disk by the other."""
    server = nbdkit()
    commands = ["-c", "write -P 7 0 64k", "-c", "flush", "-c", "write -z 2M 4M", "-c", "flush"]
    done = subprocess.run(
        ["qemu-io", "--image-opts", *commands, image_node(server, "live/trial", "vda.qcow2")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    image.write(0, b"\7" * 64 * KIB)
    assert content_of(server, live) == image.content

    qemu_io(image_node(server, "live/trial", "vda.external.qcow2"), ["write -z 2M 4M", "flush"])
    image.zero(2 * MIB, 4 * MIB)
    same_everywhere(server, "live/trial", image, tmp_path)


@pytest.mark.parametrize("file", ["vda.raw", "vda.vhd", "vda.vhdx", "vda-flat.vmdk"])
def test_zeroes_and_trims_reach_the_disk(live, image, nbdkit, file):
    server = nbdkit()
    with server.connect(f"live/trial/{file}") as handle:
        start = read_all(handle).index(image.read(0, 4 * KIB))
        handle.zero(5000, start + 100)
        image.zero(100, 5000)
        handle.trim(128 * KIB, start + 5 * MIB)
        image.trim(5 * MIB, 128 * KIB)
        handle.flush()
        # A hole with the one before it; the data behind it begins where the trim ends.
        assert start + 5 * MIB + 128 * KIB in [offset for offset, _, _ in block_status(handle)]
    assert content_of(server, live) == image.content


def test_images_of_a_session_are_listed_and_described(coldrise, live, nbdkit):
    server = nbdkit("list-formats=yes")
    handle = nbd.NBD()
    handle.set_opt_mode(True)
    handle.connect_unix(str(server.socket))
    listed = {}
    handle.opt_list(lambda name, description: listed.update({name: description}))
    handle.opt_abort()
    of_session = [name for name in listed if name.startswith("live/")]
    assert of_session == sorted([live, *(f"live/trial/{file}" for file in FILES)])
    for file in FILES:
        assert file in listed[f"live/trial/{file}"]
        with server.connect(f"live/trial/{file}") as opened:
            assert not opened.is_read_only() and opened.can_multi_conn()
            size = opened.get_size()
            with pytest.raises(nbd.Error):
                opened.pread(2, size - 1)


@pytest.mark.parametrize("file", COMPACT)
def test_a_compact_image_of_a_session_is_refused_and_named(live, nbdkit, file):
    server = nbdkit()
    refused(server, f"live/trial/{file}")
    for message in (file, "vda.vhdx", "seal the session"):
        assert message in server.messages()


def test_ending_the_session_of_a_killed_writer_frees_its_memory(coldrise, live, nbdkit):
    server = nbdkit()
    with server.connect(live) as disk, server.connect("live/trial/vda.vhd") as handle:
        disk.pwrite(b"disk", 0)
        handle.pwrite(b"kept", handle.get_size() - 60)
        layers = [*coldrise.repository.glob("layers/*"), *coldrise.repository.glob("live/*/side/*")]
        maps = [pathlib.Path(f"/dev/shm/coldrise-map-{layer.name}") for layer in layers]
        assert len(maps) == 2 and all(path.exists() for path in maps)
        server.kill()
    coldrise.json("unpublish", "trial", "--discard")
    assert not [path for path in maps if path.exists()]


def test_stored_side_files_are_encrypted(coldrise, live, nbdkit):
    secret = b"a password in a descriptor"
    with nbdkit() as server, server.connect("live/trial/vda.vmdk") as handle:
        handle.pwrite(secret, 0)
        handle.flush()
    side = list((coldrise.repository / "live").glob("*/side/*"))
    assert len(side) == 1 and side[0].stat().st_mode & 0o777 == 0o600
    for path in coldrise.repository.rglob("*"):
        if path.is_file():
            assert secret not in path.read_bytes(), path


def test_a_damaged_side_file_is_an_error(coldrise, live, nbdkit):
    with nbdkit() as server, server.connect("live/trial/vda.vhd") as handle:
        handle.pwrite(b"kept", handle.get_size() - 60)
    (side,) = (coldrise.repository / "live").glob("*/side/*")
    content = bytearray(side.read_bytes())
    content[0] ^= 1
    side.write_bytes(content)
    server = nbdkit()
    refused(server, "live/trial/vda.vhd")
    assert side.name in server.messages()
    # The disk and its other images do not need it.
    assert content_of(server, live)
    assert content_of(server, "live/trial/vda.vhdx")
