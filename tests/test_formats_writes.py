"""QEMU's writes to a writable image: the data reaches its offset on the disk, and
changes of the metadata do not move it."""

import random
import shutil
import subprocess

import pytest

from support.layouts import WRITABLE, lay_out
from support.readers import Qemu, qemu

KIB, MIB = 1 << 10, 1 << 20
SIZE = 12 * MIB + 512

# Whole clusters of zeroes and discards: a qcow2 answers these from its tables.
ZEROES = "write -z 4M 4M"
ZEROES_UNMAPPED = "write -z -u 6M 4M"
DISCARD = "discard 0 2M"


@pytest.fixture
def raw(tmp_path):
    path = tmp_path / "vda.raw"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def qemu_io(path, driver, commands):
    """Opens, writes, closes. `-d unmap`: discards reach the file."""
    arguments = [word for command in commands for word in ("-c", command)]
    qemu("qemu-io", "-d", "unmap", "-f", driver, *arguments, path)


def random_writes(seed, count=40):
    """Writes of all sizes, and zeroes that cover no whole cluster of 2 MiB."""
    chooser = random.Random(seed)
    for _ in range(count):
        length = chooser.choice([512, 4 * KIB, 60 * KIB, 700 * KIB])
        offset = chooser.randrange((SIZE - length) // 512 + 1) * 512
        if chooser.random() < 0.2:
            yield f"write -z {offset} {length}"
        else:
            yield f"write -P {chooser.randrange(1, 256)} {offset} {length}"
    yield f"write -P 7 {SIZE - 512} 512"
    yield "flush"


def disk_in(image):
    """The bytes of the image's file that are the disk's."""
    (segment,) = [segment for segment in image.data.segments if segment["source"] == "disk"]
    with open(image.data.path, "rb") as file:
        file.seek(segment["offset_bytes"])
        return file.read(segment["length_bytes"])


def changed(image, before, writes):
    """Which ranges with this rule for writes differ from what was laid out."""
    found = []
    for part, part_before in zip(image.parts, before.parts):
        now, then = part.path.read_bytes(), part_before.path.read_bytes()
        for segment in part.segments:
            start = segment["offset_bytes"]
            end = start + segment["length_bytes"]
            if segment["writes"] == writes and now[start:end] != then[start:end]:
                found.append((part, start, then[start:end]))
    return found


def drop_what_is_dropped(image, before):
    """Does what a front end does with writes that are to be forgotten."""
    for part, start, content in changed(image, before, "Dropped"):
        with open(part.path, "r+b") as file:
            file.seek(start)
            file.write(content)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("image_format", WRITABLE)
def test_writes_land_on_the_disk(tmp_path, raw, image_format, seed):
    image = lay_out(image_format, raw, tmp_path / "image")
    before = lay_out(image_format, raw, tmp_path / "before")
    commands = list(random_writes(seed))
    qemu_io(raw, "raw", commands)
    qemu_io(image.path, image.driver, commands)

    assert disk_in(image) == raw.read_bytes()
    assert not changed(image, before, "Refused")
    drop_what_is_dropped(image, before)
    opened = Qemu(image)
    opened.check()
    opened.compare(raw)
    # No file grew, except a descriptor that QEMU rewrote.
    for part in image.parts:
        grown = part.path.stat().st_size - part.size_bytes
        assert grown == 0 or (part.path.name.endswith(".vmdk") and part.size_bytes < 1024)


@pytest.mark.parametrize("command", [ZEROES, ZEROES_UNMAPPED])
def test_a_qcow2_over_a_raw_file_takes_zeroes(tmp_path, raw, command):
    image = lay_out("qcow2-external", raw, tmp_path / "image")
    before = lay_out("qcow2-external", raw, tmp_path / "before")
    commands = [command, "write -P 9 5M 64k", "flush"]
    qemu_io(raw, "raw", commands)
    qemu_io(image.path, image.driver, commands)
    assert disk_in(image) == raw.read_bytes()
    assert not changed(image, before, "Refused")
    assert changed(image, before, "Dropped"), "QEMU sets no flags any more: say so in qcow2/mod.rs"

    # A raw writer continues; the image must show its writes.
    drop_what_is_dropped(image, before)
    for path in (raw, image.data.path):
        qemu_io(path, "raw", ["write -P 5 4M 4M"])
    Qemu(image).check()
    Qemu(image).compare(raw)


def test_a_qcow2_over_a_raw_file_takes_discards(tmp_path, raw):
    image = lay_out("qcow2-external", raw, tmp_path / "image")
    before = lay_out("qcow2-external", raw, tmp_path / "before")
    qemu_io(image.path, image.driver, [DISCARD, "write -P 9 1M 64k", "flush"])
    content = bytearray(raw.read_bytes())
    content[MIB : MIB + 64 * KIB] = b"\x09" * 64 * KIB
    disk = disk_in(image)
    # Discarded blocks may read as anything; all others may not.
    assert disk[MIB : MIB + 64 * KIB] == content[MIB : MIB + 64 * KIB]
    assert disk[2 * MIB :] == content[2 * MIB :]
    assert not changed(image, before, "Refused")
    drop_what_is_dropped(image, before)
    Qemu(image).check()


@pytest.mark.parametrize("command", [ZEROES, ZEROES_UNMAPPED, DISCARD])
def test_a_qcow2_that_would_move_data_fails_instead(tmp_path, raw, command):
    """QEMU answers these in its tables, which a front end does not let it write:
    here the file refuses the L2 table. Nothing flushed is lost or misplaced."""
    image = lay_out("qcow2-full", raw, tmp_path / "image")
    before = lay_out("qcow2-full", raw, tmp_path / "before")
    tables = [s["offset_bytes"] for s in image.data.segments if s["source"] == "metadata"]
    options = {
        "driver": "qcow2",
        "discard": "unmap",
        "file.driver": "blkdebug",
        "file.image.driver": "file",
        "file.image.filename": image.path,
        "file.inject-error.0.event": "none",
        "file.inject-error.0.iotype": "write",
        "file.inject-error.0.sector": tables[-1] // 512,
        "file.inject-error.0.once": "off",
    }
    joined = ",".join(f"{key}={value}" for key, value in options.items())
    done = subprocess.run(
        ["qemu-io", "--image-opts", "-c", "write -P 7 11M 64k", "-c", "flush", "-c", command,
         "-c", "write -P 9 5M 64k", "-c", "flush", joined],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "Failed to flush the L2 table" in done.stderr, done.stderr
    Qemu(image).check()
    disk, content = disk_in(image), raw.read_bytes()
    assert disk[11 * MIB : 11 * MIB + 64 * KIB] == b"\x07" * 64 * KIB
    assert disk[2 * MIB : 4 * MIB] == content[2 * MIB : 4 * MIB]
    assert disk[10 * MIB : 11 * MIB] == content[10 * MIB : 11 * MIB]

    # Without that error the tables change.
    qemu_io(before.path, before.driver, [command, "flush"])
    pristine = lay_out("qcow2-full", raw, tmp_path / "pristine")
    assert changed(before, pristine, "Refused")


def test_metadata_that_qemu_changes_is_kept(tmp_path, raw):
    """It changes VHDX headers and VMDK descriptors; both stay as it wrote them."""
    for image_format in ("vhdx-fixed", "vmdk-esxi"):
        image = lay_out(image_format, raw, tmp_path / image_format)
        before = tmp_path / f"{image_format}-before"
        shutil.copytree(tmp_path / image_format, before)
        qemu_io(image.path, image.driver, ["write -P 1 0 512"])
        front = 1 * MIB
        with open(image.path, "rb") as now, open(before / image.path.name, "rb") as then:
            assert now.read(front) != then.read(front), image_format
        Qemu(image).check()
