"""An eavesdropper on the line between two sites sees neither content nor names."""

import contextlib
import random
import subprocess
import sys

from support.blake3 import blake3
from support.capture import found
from support.cli import Coldrise
from support.copies import check
from support.far_site import FarSite
from support.line import FAR_ADDRESS, Line

KIB, MIB = 1 << 10, 1 << 20
# As FarSite has it.
PIECE = 64 * KIB
MACHINE, POINT, DISK = "payroll-server", "20261101T100000Z", "disk-of-salaries"
CONFIGURATION = b"<domain><name>payroll-server</name><uuid>3f0c8a52</uuid></domain>"

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("ready", flush=True)
    taken, _ = listener.accept()
    while taken.recv(1 << 16):
        pass
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as taken:
    taken.sendall(sys.stdin.buffer.read())
"""


def test_hashes_match_the_paper():
    # From its test vectors: byte number n is n modulo 251.
    expected = {0: "af1349b9f5f9a1a6a0404dea36dcc949", 1: "2d3adedff11b61f14c886e35afa03673",
                1024: "42214739f095a406f3fc83deb889744a", 1025: "d00278ae47eb27b34faecf67b4fe263f",
                31744: "62b6960e1a44bcc1eb1a611a8d6235b6"}
    for length, begin in expected.items():
        assert blake3(bytes(at % 251 for at in range(length)))[:16].hex() == begin, length


def test_an_eavesdropper_sees_neither_content_nor_names(tmp_path):
    pieces = random.Random(19)
    # Raw, and incompressible content; text that compression would reveal in parts.
    content = pieces.randbytes(MIB // 2) + b"the salary of the director is 4,211. " * 4000
    content += bytes(-len(content) % PIECE)
    later = bytearray(content)
    later[256 * KIB : 260 * KIB] = pieces.randbytes(4 * KIB)
    near = Coldrise.encrypted(tmp_path)
    near.init()
    points = {POINT: content, "20261102T100000Z": bytes(later)}
    configuration = tmp_path / "domain.xml"
    configuration.write_bytes(CONFIGURATION)
    for point, disk in points.items():
        (tmp_path / "disk.raw").write_bytes(disk)
        near.json("backup", MACHINE, f"{DISK}=raw:{tmp_path}/disk.raw", "--config", configuration, "--time", point)
    capture = tmp_path / "captured"
    with contextlib.closing(Line(tmp_path, mbit=100, round_trip_ms=4, loss=0.002, capture=capture)) as line:
        near.wrap = line.near.command
        with contextlib.closing(FarSite(tmp_path, line=line, is_encrypted=True)) as far:
            code = far.pair(near)
            # A site that knows nothing, and one that has all of it: names travel in both.
            near.json("copy", "--to", "far")
            near.json("copy", "--to", "far", "--as", "another-server", MACHINE)
            check(far.program, {point: {DISK: disk} for point, disk in points.items()}, tmp_path, MACHINE)
            secrets = {
                "machine": MACHINE.encode(), "other machine": b"another-server", "disk": DISK.encode(),
                "points": POINT.encode(), "text": b"the salary of", "configuration": b"<domain>", "uuid": b"3f0c8a52",
                "code": code.encode(), "code without dashes": code.replace("-", "").encode(),
                "passphrase": b"another one", "protocol": b"chunk_size",
            }
            names = b""
            for number, at in enumerate(range(0, len(content), PIECE)):
                name = blake3(content[at : at + PIECE])
                secrets[f"name {number}"], secrets[f"name {number} in hex"] = name[:8], name.hex()[:16].encode()
                names += name + name.hex().encode()
            for disk in points.values():
                for at in range(0, MIB // 2, 16 * KIB):
                    secrets[f"content at {at}, {len(secrets)}"] = bytes(disk[at + 100 : at + 116])
            sent = near.json("copy", "--to", "far")
            assert sent["points"] == 0
    seen, count = found(capture, secrets)
    # The search has looked at all of it, and at nothing else.
    assert count > MIB // 2
    assert seen == set()

    # The same search finds all of it in a transfer without encryption.
    plain = b"".join((*points.values(), names, MACHINE.encode(), b"another-server", DISK.encode(), POINT.encode(), CONFIGURATION,
                      code.encode(), code.replace("-", "").encode(), b"another one", b"chunk_size"))
    open_capture = tmp_path / "captured-open"
    with contextlib.closing(Line(tmp_path, mbit=100, round_trip_ms=4, loss=0.01, capture=open_capture)) as line:
        with subprocess.Popen(line.far.command(sys.executable, "-c", LISTEN, FAR_ADDRESS), stdout=subprocess.PIPE) as listener:
            assert listener.stdout.readline() == b"ready\n"
            sender = line.near.command(sys.executable, "-c", SEND, FAR_ADDRESS)
            subprocess.run(sender, input=plain, check=True, timeout=60)
            listener.wait(timeout=60)
    seen, count = found(open_capture, secrets)
    assert count == len(plain)
    assert seen == secrets.keys()
