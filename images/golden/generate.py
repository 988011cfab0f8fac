#!/usr/bin/python3
"""Writes the metadata of every layout, for people to read and for tests to compare.

    images/golden/generate.py [FOLDER]        (default: this file's folder)

FORMAT.hex is the metadata of a small disk as text, without zeroes. digests.txt has one
line per format, disk and file: the digest of all its metadata. They change only with a
deliberate change of a layout or of the derivation of ids: then run this script and
check the difference. Layouts come from formats/examples/lay_out.rs
(`cargo build --release -p coldrise-formats --example lay_out`).
"""

import contextlib
import hashlib
import os
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from support.layouts import COMPACT, WRITABLE, Refused, lay_out  # noqa: E402

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# Compressed data depends on the version of the compression library.
FORMATS = [name for name in [*WRITABLE, *COMPACT] if name != "vmdk-stream"]
SMALL = MIB + 512
# With sector sizes: odd, whole, beyond what VHD holds, and disks of 4 KiB sectors.
DISKS = [(512, 512), (SMALL, 512), (3 * GIB, 512), (2 * TIB + 512, 512), (SMALL - 512, 4096)]
PIECE = 1 << 20


def disk(folder, size):
    """A sparse disk with data at its start, in its middle and at its end."""
    path = folder / "disk.raw"
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.truncate(size)
        for offset in {0, size // 2 // 4096 * 4096, (size - 512) // 4096 * 4096}:
            file.seek(offset)
            file.write(b"\1" * min(4096, size - offset))
    return path


def metadata(part):
    """The metadata around the disk: (offset, bytes), in order."""
    with open(part.path, "rb") as file:
        for segment in part.segments:
            if segment["source"] != "metadata":
                continue
            at, left = segment["offset_bytes"], segment["length_bytes"]
            while left:
                piece = os.pread(file.fileno(), min(left, PIECE), at)
                yield at, piece
                at, left = at + len(piece), left - len(piece)


def dump(part):
    """Lines of 16 bytes; `*` stands for repeated lines, zeroes are omitted."""
    last, repeated = None, False
    for offset, content in metadata(part):
        for start in range(0, len(content), 16):
            line = content[start : start + 16]
            if not any(line):
                last = None
            elif line == last:
                if not repeated:
                    yield "*"
                repeated = True
            else:
                text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
                yield f"{offset + start:012x}  {line.hex(' ', 2):<39}  {text}"
                last, repeated = line, False


def generate(target):
    sums = []
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch, contextlib.chdir(scratch):
        # Relative, because the path of an external data file is part of its image.
        folder = pathlib.Path("image")
        for size, sector_bytes in DISKS:
            raw = disk(pathlib.Path(), size)
            for name in FORMATS:
                try:
                    image = lay_out(name, raw, folder, sector_bytes)
                except Refused:
                    sums.append(f"{'refused':64}  {name} {size} {sector_bytes}")
                    folder.rmdir()
                    continue
                for part in image.parts:
                    digest = hashlib.sha256()
                    for offset, content in metadata(part):
                        digest.update(offset.to_bytes(8, "big") + content)
                    sums.append(
                        f"{digest.hexdigest()}  {name} {size} {sector_bytes} {part.path.name}"
                    )
                if size == SMALL:
                    lines = []
                    for part in image.parts:
                        lines += [f"{part.path.name}: {part.size_bytes} bytes", *dump(part)]
                    text = "\n".join(lines) + "\n"
                    (target / f"{name}.hex").write_text(text, encoding="ascii")
                for part in image.parts:
                    part.path.unlink()
                folder.rmdir()
    (target / "digests.txt").write_text("\n".join(sums) + "\n", encoding="ascii")


if __name__ == "__main__":
    generate(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE).absolute())
