"""A repository on a file system that cannot be written can be read and served."""

import contextlib
import json
import shutil
import signal
import subprocess

import nbd
import pytest

from support.cli import Coldrise
from support.mounted import Mounted

pytestmark = pytest.mark.encrypted


@pytest.fixture
def read_only(coldrise, live, tmp_path):
    """The repository with a point and an idle session, mounted read-only at another place."""
    place = tmp_path / "read-only"
    place.mkdir()
    subprocess.run(["mount", "--bind", coldrise.repository, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
    yield Coldrise(place, coldrise.passphrase_file)
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def copied(coldrise, point, tmp_path):
    """The same of a copy without the files of locks."""
    copy = tmp_path / "copy"
    shutil.copytree(coldrise.repository, copy)
    for lock in ("live/lock", "leases/lock", "repository.lock", "writer.lock"):
        with contextlib.suppress(FileNotFoundError):
            (copy / lock).unlink()
    subprocess.run(["mount", "--bind", copy, copy], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", copy], check=True)
    yield Coldrise(copy, coldrise.passphrase_file)
    subprocess.run(["umount", "--lazy", copy], check=True)


COMMANDS = [["list"], ["show", "web01/latest"], ["sessions"], ["stats"], ["verify"],
            ["gc", "--dry-run"], ["prune", "--dry-run", "--keep-last", "1"], ["key", "list"],
            ["doctor"]]


@pytest.mark.parametrize("where", ["read_only", "copied"])
def test_commands_that_change_nothing(where, request, point, tmp_path):
    program = request.getfixturevalue(where)
    for command in COMMANDS:
        program.json(*command)
    program.json("restore", f"{point}/vda", tmp_path / "out.raw")
    refused = program.run("--json", "forget", point)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["kind"] == "read_only"
    assert "read-only file system" in refused.stderr and "--read-only" in refused.stderr


def test_serve_nbd(read_only, point, live, image, tmp_path):
    socket = tmp_path / "socket"
    process = read_only.start("serve", "nbd", "--read-only", "--socket", socket,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline().startswith("ready")
        for export in (f"{point}/vda", live):
            handle = nbd.NBD()
            handle.set_export_name(export)
            handle.connect_unix(str(socket))
            assert bytes(handle.pread(4096, 0)) == image.read(0, 4096)
            handle.shutdown()
    finally:
        process.send_signal(signal.SIGTERM)
        _output, messages = process.communicate(timeout=30)
    assert process.returncode == 0, messages


def test_mount(read_only, point, live, image, tmp_path):
    mounted = Mounted(read_only, tmp_path / "mounted", "--read-only")
    try:
        for folder in (point, "live/trial"):
            path = tmp_path / "mounted" / folder / "vda.raw"
            with open(path, "rb") as file:
                assert file.read(4096) == image.read(0, 4096)
    finally:
        mounted.stop()
        mounted.clear()


def test_serve_nfs(read_only, serve_on, live, point, image):
    server = serve_on(read_only, "--read-only")
    nfs = server.connect()
    for folder in (point, "live/trial"):
        file = nfs.walk(server.root(), f"{folder}/vda.raw")
        assert nfs.read(file, 0, 4096)[0] == image.read(0, 4096)
