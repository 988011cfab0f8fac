"""Repositories on file systems that several hosts can mount are refused."""

import fcntl
import json
import os

import pytest

from support.cli import Coldrise
from support.fusemount import fuse_mount

pytestmark = pytest.mark.encrypted


@pytest.mark.parametrize("kind", ["fuse.sshfs", "fuse.ceph-fuse", "fuse.glusterfs"])
def test_a_file_system_of_several_hosts_is_refused(coldrise, tmp_path, kind):
    with fuse_mount(tmp_path / "shared", kind) as shared:
        for place in (shared, shared / "new"):
            program = Coldrise(place, coldrise.passphrase_file)
            for command in (["init"], ["list"]):
                if command == ["list"] and place != shared:
                    continue
                done = program.run("--json", *command)
                assert done.returncode == 1, done.stdout
                assert json.loads(done.stdout)["error"]["kind"] == "unsupported"
                assert kind in done.stderr and str(shared) in done.stderr
                assert "local file system" in done.stderr


def test_a_repository_partly_on_an_unsupported_file_system_is_refused(coldrise, tmp_path):
    (coldrise.repository / "layers").rmdir()
    with fuse_mount(coldrise.repository / "layers", "fuse.s3fs"):
        done = coldrise.run("--json", "list")
        assert json.loads(done.stdout)["error"]["kind"] == "unsupported"
        assert str(coldrise.repository / "layers") in done.stderr


def test_a_local_fuse_file_system_is_not_refused(coldrise, tmp_path):
    with fuse_mount(tmp_path / "local", "fuse.mergerfs") as local:
        done = Coldrise(local, coldrise.passphrase_file).run("list")
        assert done.returncode == 10, done.stderr


def test_locks_are_files_and_never_directories(coldrise, point, tmp_path):
    """On many file systems the lock of a directory does not exclude other hosts."""
    empty = tmp_path / "empty"
    empty.mkdir()
    folders = [empty, coldrise.repository, *(p for p in coldrise.repository.iterdir() if p.is_dir())]
    held = [os.open(folder, os.O_RDONLY) for folder in folders]
    for folder in held:
        fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        coldrise.json("restore", f"{point}/vda", tmp_path / "out.raw", timeout_s=20)
        second = tmp_path / "second"
        second.write_text("another one\n", encoding="utf-8")
        coldrise.json("key", "add", "second", "--new-passphrase-file", second, timeout_s=20)
        Coldrise(empty, coldrise.passphrase_file).init()
    finally:
        for folder in held:
            os.close(folder)


def test_init_leaves_a_foreign_folder_as_it_is(coldrise, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter").write_text("dear", encoding="utf-8")
    done = Coldrise(foreign, coldrise.passphrase_file).run("init")
    assert done.returncode == 1
    assert [path.name for path in foreign.iterdir()] == ["letter"]
