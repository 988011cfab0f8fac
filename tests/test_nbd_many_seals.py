"""NBD: a served session is sealed hundreds of times."""

import json
import os
import pathlib
import socket
import subprocess

import nbd
import pytest

from support.cli import PROGRAM, Coldrise
from support.image import Image

MIB = 1 << 20
DESCRIPTORS, SEALS = 128, 140


@pytest.fixture
def plain(tmp_path):
    """A repository without encryption: its keys take no time to derive."""
    program = Coldrise(tmp_path / "repository")
    program.init("--no-encryption")
    return program


class Served:
    """`coldrise serve nbd` that may open few files."""

    def __init__(self, coldrise, path):
        self.path = path
        self.process = subprocess.Popen(
            ["prlimit", f"--nofile=64:{DESCRIPTORS}", PROGRAM, "serve", "nbd", "--socket", path],
            env=coldrise.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert self.process.stdout.readline().startswith("ready")

    def connect(self, name):
        handle = nbd.NBD()
        handle.set_export_name(name)
        handle.connect_unix(str(self.path))
        return handle

    def descriptors(self):
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (nbdkit,) = children.read_text(encoding="ascii").split()
        return len(os.listdir(f"/proc/{nbdkit}/fd"))

    def __enter__(self):
        return self

    def __exit__(self, *_failed):
        self.process.terminate()
        _output, messages = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, messages


def seal(coldrise):
    """As `coldrise seal` does it, without starting the program."""
    (control,) = (coldrise.repository / "live").glob("*/control")
    folder = os.open(control.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(60)
            # Addresses of sockets are short.
            asked.connect(f"/proc/self/fd/{folder}/control")
            asked.sendall(b'"seal"\n')
            answers = map(json.loads, asked.makefile())
            answer = next(answer for answer in answers if answer != "committing")
    finally:
        os.close(folder)
    assert "sealed" in answer, answer
    return answer["sealed"]["point"]["point"]


def test_a_session_is_sealed_more_often_than_files_can_be_open(plain, tmp_path):
    disk = Image(8 * MIB)
    disk.fill(0, 8 * MIB, "first")
    point = plain.backup("web01", vda=disk.save(tmp_path / "vda.raw"))
    live = plain.publish(point, "trial")["vda"]
    contents = {}

    with Served(plain, tmp_path / "served") as server:
        writer = server.connect(live)
        for turn in range(SEALS):
            data = turn.to_bytes(4, "big") * 1024
            # Every second one covers an earlier one.
            at = (turn // 2) * 4096 * 3
            writer.pwrite(data, at)
            disk.write(at, data)
            sealed = seal(plain)
            if turn in (0, 70, SEALS - 1):
                contents[f"web01/{sealed}/vda"] = bytes(disk.content)
        assert bytes(writer.pread(8 * MIB, 0)) == disk.content
        assert server.descriptors() < DESCRIPTORS
        writer.shutdown()

    with Served(plain, tmp_path / "again") as again:
        for name, content in (contents | {live: bytes(disk.content)}).items():
            handle = again.connect(name)
            assert bytes(handle.pread(8 * MIB, 0)) == content, name
            handle.shutdown()


# A file of the database, and one outside it.
@pytest.mark.parametrize("limit", [6, 7])
def test_too_few_descriptors_give_advice(plain, limit):
    refused = subprocess.run(
        ["prlimit", f"--nofile={limit}:{limit}", PROGRAM, "list"],
        env=plain.environment(), capture_output=True, text=True, check=False)  # fmt: skip
    assert refused.returncode == 1
    assert "raise its limit (ulimit -n" in refused.stderr, refused.stderr
