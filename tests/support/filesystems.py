"""Disks with file systems, made without the host's kernel: no loop device, no mount."""

import pathlib
import struct
import subprocess
import zlib

MIB = 1 << 20
SECTOR = 512


def run(*words, **keywords):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **keywords).stdout


def empty(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return path


def ext4(path, tree, size=48 * MIB, *options):
    run("/sbin/mkfs.ext4", "-q", "-F", *options, "-d", tree, empty(path, size))
    return path


def leave_in_journal(path, name, content):
    """The file's first block gets this content in the journal only, as after a power cut."""
    block = run("/sbin/debugfs", "-R", f"blocks {name}", path).split()[0]
    bytes_ = pathlib.Path(f"{path}.block")
    bytes_.write_bytes(content.ljust(4096, b"\0"))
    run("/sbin/debugfs", "-w", "-f", "/dev/stdin", path, input=f"jo -c\njw -b {block} {bytes_}\njc\n")
    assert "needs_recovery" in run("/sbin/debugfs", "-R", "stats", path)
    bytes_.unlink()


def xfs(path, size=320 * MIB):
    run("/sbin/mkfs.xfs", "-q", "-L", "things", empty(path, size))
    return path


def btrfs(path, tree, size=128 * MIB, *options):
    run("/sbin/mkfs.btrfs", "-q", "-L", "pool", *options, "-r", tree, empty(path, size))
    return path


def ntfs(path, file, size=16 * MIB):
    run("/sbin/mkntfs", "-q", "-F", "-Q", empty(path, size))
    run("/usr/sbin/ntfscp", "-q", path, file, pathlib.Path(file).name)
    return path


def fat(path, file, size=34 * MIB):
    run("/sbin/mkfs.vfat", "-F", "32", "-n", "EFI", empty(path, size))
    run("/usr/bin/mcopy", "-i", path, file, f"::{pathlib.Path(file).name}")
    return path


def partitioned(path, parts):
    """A disk with a GPT and these images as its partitions."""
    start, script, places = 2048, "label: gpt\n", []
    for part in parts:
        sectors = part.stat().st_size // SECTOR
        script += f"start={start}, size={sectors}\n"
        places.append((start * SECTOR, part))
        start += -(-sectors // 2048) * 2048
    empty(path, start * SECTOR + MIB)
    run("/sbin/sfdisk", "-q", path, input=script)
    for offset, part in places:
        copy(part, path, offset)
    return path


def copy(source, target, offset):
    """Copies what is not zero."""
    with open(source, "rb") as reader, open(target, "r+b") as writer:
        while piece := reader.read(MIB):
            if piece.strip(b"\0"):
                writer.seek(offset)
                writer.write(piece)
            offset += len(piece)


def luks(path, content, passphrase):
    command = ["qemu-img", "convert", "--object", f"secret,id=key,data={passphrase}", "-f", "raw", "-O", "luks",
               "-o", "key-secret=key,iter-time=10", content, path]
    # QEMU 7.2 measures how costly a passphrase is, and gives up if the measured time is too short for its clock.
    for _ in range(100):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return path
        assert "Unable to get accurate CPU usage" in done.stderr, done.stderr
    raise AssertionError(done.stderr)


def lvm(path, content, group, volume):
    """A physical volume of LVM that holds one linear volume of that content."""
    content = pathlib.Path(content).read_bytes()
    extent, start, area = 4 * MIB, MIB, 4096
    extents = -(-len(content) // extent)
    size = start + extents * extent
    ids = [("abcdefghijklmnopqrstuvwxyz012345" * 2)[i:i + 32] for i in range(3)]

    def dashed(i):
        return "-".join(ids[i][a:b] for a, b in ((0, 6), (6, 10), (10, 14), (14, 18), (18, 22), (22, 26), (26, 32)))

    def crc(data):
        return zlib.crc32(data, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF

    text = f"""{group} {{
id = "{dashed(0)}"
seqno = 1
format = "lvm2"
status = ["RESIZEABLE", "READ", "WRITE"]
flags = []
extent_size = {extent // SECTOR}
max_lv = 0
max_pv = 0
metadata_copies = 0
physical_volumes {{
pv0 {{
id = "{dashed(1)}"
device = "/dev/any"
status = ["ALLOCATABLE"]
flags = []
dev_size = {size // SECTOR}
pe_start = {start // SECTOR}
pe_count = {extents}
}}
}}
logical_volumes {{
{volume} {{
id = "{dashed(2)}"
status = ["READ", "WRITE", "VISIBLE"]
flags = []
segment_count = 1
segment1 {{
start_extent = 0
extent_count = {extents}
type = "striped"
stripe_count = 1
stripes = ["pv0", 0]
}}
}}
}}
}}
contents = "Text Format Volume Group"
version = 1
description = ""
creation_host = "any"
creation_time = 1
\0""".encode()
    header = struct.pack("<I8s32sQQQQQQQQQIIQQ", 32, b"LVM2 001", ids[1].encode(), size, start, 0, 0, 0,
                         area, start - area, 0, 0, 2, 1, 0, 0).ljust(SECTOR - 20, b"\0")
    area_header = struct.pack("<16sIQQQQII", b" LVM2 x[5A%r0N*>", 1, area, start - area, SECTOR, len(text), crc(text),
                              0).ljust(SECTOR - 4, b"\0")
    with open(empty(path, size), "r+b") as disk:
        disk.seek(SECTOR)
        disk.write(struct.pack("<8sQI", b"LABELONE", 1, crc(header)) + header)
        disk.seek(area)
        disk.write(struct.pack("<I", crc(area_header)) + area_header + text)
        disk.seek(start)
        disk.write(content)
    return path


def mirror(path, content):
    """A member of a RAID 1 of two disks, the other of which is lost (version 1.2 of the metadata)."""
    content = pathlib.Path(content).read_bytes()
    offset = 2048
    sectors = len(content) // SECTOR
    superblock = bytearray(256 + 2 * 4)
    struct.pack_into("<IIII16s32sQIIQIII", superblock, 0, 0xA92B4EFC, 1, 0, 0, b"0123456789abcdef", b"any:0", 1, 1, 0,
                     sectors, 0, 2, 0)
    struct.pack_into("<QQQQII16s", superblock, 128, offset, sectors, 8, 0, 0, 0, b"fedcba9876543210")
    struct.pack_into("<QQQII", superblock, 192, 1, 10, 0xFFFFFFFFFFFFFFFF, 0, 4)
    struct.pack_into("<HHHH", superblock, 256, 0, 0xFFFE, 0xFFFF, 0xFFFF)
    total = sum(struct.unpack(f"<{len(superblock) // 4}I", superblock))
    struct.pack_into("<I", superblock, 216, ((total & 0xFFFFFFFF) + (total >> 32)) & 0xFFFFFFFF)
    with open(empty(path, (offset + sectors) * SECTOR), "r+b") as disk:
        disk.seek(8 * SECTOR)
        disk.write(superblock)
        disk.seek(offset * SECTOR)
        disk.write(content)
    return path
