"""Disks with file systems, made without the host's kernel: no loop device, no mount."""

import hashlib
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
    # QEMU 7.2 measures the cost of a passphrase, and fails if the measured time is too short for its clock.
    for _ in range(100):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return path
        assert "Unable to get accurate CPU usage" in done.stderr, done.stderr
    raise AssertionError(done.stderr)


def lvm(path, content, group, volume):
    """A physical volume of LVM that holds one linear volume of that content."""
    volume_group([path], group, {volume: ("linear", content, [0])})
    return path


def volume_group(paths, group, volumes, mark="a"):
    """Physical volumes of LVM with a group over them. A volume is (kind, content, numbers of the physical volumes): "linear" over
    them one after the other, "raid1" with a copy on each. Groups with another `mark` have other unique names."""
    extent, start, area = 4 * MIB, MIB, 4096
    fills, described, contents = [0] * len(paths), [], []

    def unique(name):
        letters = hashlib.sha256(f"{mark} {name}".encode()).hexdigest()[:32]
        return "-".join(letters[a:b] for a, b in ((0, 6), (6, 10), (10, 14), (14, 18), (18, 22), (22, 26), (26, 32)))

    def crc(data):
        return zlib.crc32(data, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF

    def logical(name, status, segments):
        listed = ", ".join(f'"{word}"' for word in status)
        described.append(f'{name} {{\nid = "{unique(name)}"\nstatus = [{listed}]\nflags = []\nsegment_count = {len(segments)}')
        described.extend(f"segment{number} {{\n{segment}\n}}" for number, segment in enumerate(segments, 1))
        described.append("}")

    def pieces(content, numbers):
        """Segments that hold the content, as much on each of these physical volumes."""
        extents = -(-len(content) // extent)
        each, first, segments = -(-extents // len(numbers)), 0, []
        for number in numbers:
            count = min(each, extents - first)
            contents.append((number, start + fills[number] * extent, content[first * extent:(first + count) * extent]))
            segments.append(f'start_extent = {first}\nextent_count = {count}\ntype = "striped"\nstripe_count = 1\n'
                            f'stripes = ["pv{number}", {fills[number]}]')
            fills[number] += count
            first += count
        return segments

    for name, (kind, image, numbers) in volumes.items():
        content = pathlib.Path(image).read_bytes()
        if kind == "linear":
            logical(name, ("READ", "WRITE", "VISIBLE"), pieces(content, numbers))
            continue
        parts = []
        for copy_, number in enumerate(numbers):
            for part, held in (("rmeta", mirror_metadata(copy_, len(numbers), len(content))), ("rimage", content)):
                parts.append(f"{name}_{part}_{copy_}")
                logical(parts[-1], ("READ", "WRITE"), pieces(held, [number]))
        listed = ", ".join(f'"{part}"' for part in parts)
        logical(name, ("READ", "WRITE", "VISIBLE"), [
            f'start_extent = 0\nextent_count = {-(-len(content) // extent)}\ntype = "{kind}"\ndevice_count = {len(numbers)}\n'
            f"region_size = 4096\nraids = [{listed}]"])
    sizes = [start + fill * extent for fill in fills]
    physical = [f'pv{number} {{\nid = "{unique(number)}"\ndevice = "/dev/any"\nstatus = ["ALLOCATABLE"]\nflags = []\n'
                f"dev_size = {sizes[number] // SECTOR}\npe_start = {start // SECTOR}\npe_count = {fill}\n}}"
                for number, fill in enumerate(fills)]
    text = "\n".join([
        f'{group} {{\nid = "{unique(group)}"\nseqno = 1\nformat = "lvm2"\nstatus = ["RESIZEABLE", "READ", "WRITE"]\nflags = []',
        f"extent_size = {extent // SECTOR}\nmax_lv = 0\nmax_pv = 0\nmetadata_copies = 0",
        "physical_volumes {", *physical, "}\nlogical_volumes {", *described, "}\n}",
        'contents = "Text Format Volume Group"\nversion = 1\ndescription = ""\ncreation_host = "any"\ncreation_time = 1\n\0',
    ]).encode()
    area_header = struct.pack("<16sIQQQQII", b" LVM2 x[5A%r0N*>", 1, area, start - area, SECTOR, len(text), crc(text),
                              0).ljust(SECTOR - 4, b"\0")
    for number, path in enumerate(paths):
        header = struct.pack("<I8s32sQQQQQQQQQIIQQ", 32, b"LVM2 001", unique(number).replace("-", "").encode(), sizes[number],
                             start, 0, 0, 0, area, start - area, 0, 0, 2, 1, 0, 0).ljust(SECTOR - 20, b"\0")
        with open(empty(path, sizes[number]), "r+b") as disk:
            disk.seek(SECTOR)
            disk.write(struct.pack("<8sQI", b"LABELONE", 1, crc(header)) + header)
            disk.seek(area)
            disk.write(struct.pack("<I", crc(area_header)) + area_header + text)
            for _, offset, content in (held for held in contents if held[0] == number):
                disk.seek(offset)
                disk.write(content)


def mirror_metadata(position, count, size):
    """The metadata of device-mapper for a copy of a RAID 1: a superblock, and a bitmap without changes."""
    sectors, all_ = size // SECTOR, 0xFFFFFFFFFFFFFFFF
    superblock = struct.pack("<4sIIIQQQQIIIIQIIIIQQQQ", b"DmRd", 1, count, position, 1, 0, all_, all_, 1, 0, 0, 0, all_, 1, 0, 0, 0,
                             sectors, 0, 0, sectors)
    return superblock.ljust(4096, b"\0") + struct.pack("<4sI16sQQQIII", b"bitm", 4, b"", 1, 1, sectors, 0, 2 * MIB, 5).ljust(4096, b"\0")


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
