"""coldrise files: volume groups of LVM that lack a disk, or that are in a machine twice."""

import os
import shutil

import pytest

from support import filesystems
from support.cli import Coldrise
from test_files import KEY, MIB, content, files, runtime

__all__ = ["runtime"]

BIG = 12 * MIB


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Physical volumes: p0 and p1 of one group, q of another one with the same name, and a file system for all."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "tree").mkdir()
    (folder / "tree/hello.txt").write_text("hello\n")
    # Longer than three quarters of its file system, less the journal: of "span" it lies on both physical volumes.
    (folder / "tree/big").write_bytes(os.urandom(BIG))
    inner = filesystems.ext4(folder / "inner", folder / "tree", 16 * MIB)
    filesystems.volume_group([folder / "p0", folder / "p1"], "vg0", {
        "near": ("linear", inner, [0]), "far": ("linear", inner, [1]), "span": ("linear", inner, [0, 0, 0, 1]),
        "mirror": ("raid1", inner, [0, 1])})
    filesystems.volume_group([folder / "q"], "vg0", {"near": ("linear", inner, [0])}, mark="b")
    return folder


@pytest.fixture(scope="module")
def groups(runtime, images):
    coldrise = Coldrise.encrypted(images)
    coldrise.init()
    coldrise.backup("whole", vda=images / "p0", vdb=images / "p1")
    coldrise.backup("half", vda=images / "p0")
    coldrise.backup("clone", vda=images / "p0", vdb=images / "p1", vdc=images / "p0", vdd=images / "p1")
    coldrise.backup("other", vda=images / "p0", vdb=images / "p1", vdc=images / "q")
    return coldrise


def systems(coldrise, address, *options):
    return {one["name"]: one for one in files(coldrise, "ls", address, *options)["file_systems"]}


def notes(coldrise, address):
    return {name: one["note"] for name, one in systems(coldrise, address).items()}


def refusal(coldrise, *words, status=1):
    return files(coldrise, *words, status=status)["error"]["message"]


def test_a_complete_group_is_used_without_a_warning(groups):
    for address in ("whole/latest:", "whole/latest/vdb,vda:"):
        found = systems(groups, address)
        # Nor parts of a mirror, which only LVM reads.
        assert set(found) == {"vda", "vdb", "vg0-near", "vg0-far", "vg0-span", "vg0-mirror"}
        assert all(one["is_readable"] and one["note"] is None for name, one in found.items() if name.startswith("vg0"))
    assert len(content(groups, "whole/latest/vda,vdb:vg0-span/big")) == BIG


@pytest.mark.parametrize(("address", "said"), [
    ("half/latest", "vg0 lacks a physical volume that is on no disk of this point (vda; UUID "),
    ("whole/latest/vda", "vg0 lacks a physical volume that is not on vda (UUID "),
])
def test_a_volume_of_an_incomplete_group_reports_missing_disks(groups, tmp_path, address, said):
    found = systems(groups, f"{address}:")
    for name in ("vg0-far", "vg0-span", "vg0-mirror"):
        assert said in found[name]["note"], found
        assert ("coldrise files ls whole/latest:" in found[name]["note"]) == (address == "whole/latest/vda")
    assert found["vg0-near"]["note"] is None and not found["vg0-far"]["is_readable"]
    # A mirror needs one copy only.
    assert "read without it" in found["vg0-mirror"]["note"] and "read without it" not in found["vg0-span"]["note"]
    for name in ("vg0-near", "vg0-mirror"):
        assert len(content(groups, f"{address}:{name}/big")) == BIG, name
    assert "big" in [entry["path"] for entry in files(groups, "ls", f"{address}:vg0-span/")["entries"]]
    for words in (("get", f"{address}:vg0-span/big", tmp_path / "big"), ("ls", f"{address}:vg0-far/"),
                  ("get", f"{address}:vg0-far/hello.txt", tmp_path / "hello")):
        assert said in refusal(groups, *words), words
    # Part of a folder is better than nothing.
    done = groups.run("files", "get", f"{address}:vg0-span/", tmp_path / "all.tar", timeout_s=300)
    assert done.returncode == 1 and done.stderr.count(said) == 1 and "warning: not read: /big" in done.stderr, done.stderr


@pytest.mark.parametrize(("machine", "said", "typed"), [
    ("clone", "vg0 is there twice, on vda, vdb, vdc and vdd", "vda,vdb"),
    ("other", "vg0 is there twice, on vda, vdb and vdc", "vdc"),
])
def test_a_duplicated_group_reports_what_to_type(groups, machine, said, typed):
    found = systems(groups, f"{machine}/latest:")
    assert set(found) >= {"vda", "vdc", "vg0-near", "vg0-span"}
    for one in found.values():
        assert said in one["note"] and f" {machine}/latest/{typed}:" in one["note"] and "coldrise files ls" in one["note"], one
        assert not one["is_readable"]
    said_too = refusal(groups, "ls", f"{machine}/latest:vg0-near/")
    assert said in said_too and typed in said_too
    assert said in refusal(groups, "ls", f"{machine}/latest:/")
    chosen = systems(groups, f"{machine}/latest/{typed}:")
    assert all(one["note"] is None for name, one in chosen.items() if name.startswith("vg0"))
    assert content(groups, f"{machine}/latest/{typed}:vg0-near/hello.txt") == b"hello\n"


def test_one_disk_of_a_clone_is_named(groups, images):
    groups.backup("dup", vda=images / "q", vdc=images / "q")
    note = notes(groups, "dup/latest:")["vg0-near"]
    assert "vg0 is there twice, on vda and vdc" in note and "dup/latest/vda:" in note and "dup/latest/vdc:" in note
    assert content(groups, "dup/latest/vdc:/hello.txt") == b"hello\n"
    versions = files(groups, "versions", "dup:vg0-near/hello.txt", status=1)["versions"]
    assert "vg0 is there twice" in versions[0]["reason"]


def test_a_duplicated_array_is_reported(groups, images, tmp_path):
    member = filesystems.mirror(tmp_path / "member", images / "inner")
    groups.backup("array", vda=member, vdc=member)
    found = systems(groups, "array/latest:")
    for name in ("vda", "vdc", "md0"):
        assert "md0 is there twice, on vda and vdc" in found[name]["note"] and "array/latest/vdc:" in found[name]["note"]
    assert systems(groups, "array/latest/vdc:")["md0"]["note"] is None
    # As with one of them only.
    assert content(groups, "array/latest:/hello.txt") == b"hello\n"


def test_an_invalid_list_of_disks_is_refused(groups):
    for address, said in (
        ("whole/latest/vda,:", "several disks are named as in MACHINE/POINT/vda,vdb:"),
        ("whole/latest/vda,vda:", "vda twice"),
        ("whole/latest/vda,VDB:", "several disks are named as in MACHINE/POINT/vda,vdb:"),
    ):
        done = groups.run("files", "ls", address)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "has no disk vdz; it has vda, vdb" in refusal(groups, "ls", "whole/latest/vda,vdz:")


def test_the_missing_disk_may_be_encrypted(groups, images, tmp_path):
    """The machine that stays has read half of the group: the key completes it."""
    secret = filesystems.luks(tmp_path / "secret", images / "p1", KEY)
    groups.backup("locked", vda=images / "p0", vdb=secret)
    (tmp_path / "key").write_text(KEY)
    assert "it may be in vdb, which is encrypted" in notes(groups, "locked/latest:")["vg0-span"]
    found = systems(groups, "locked/latest:", "--key-file", tmp_path / "key")
    assert all(found[name]["note"] is None and found[name]["is_readable"] for name in ("vg0-span", "vg0-far"))
    files(groups, "ls", "locked/latest:vg0-span/")
    big = content(groups, "locked/latest:vg0-span/big", "--key-file", str(tmp_path / "key"))
    assert big == (images / "tree/big").read_bytes()
    shutil.rmtree(tmp_path)


def test_volumes_on_encrypted_disks_are_not_reported_as_absent(groups, images, tmp_path):
    secret = filesystems.luks(tmp_path / "secret", images / "q", KEY)
    groups.backup("sealed", vda=images / "inner", vdb=secret)
    (version,) = files(groups, "versions", "sealed:vg0-near/hello.txt", status=1)["versions"]
    assert version["state"] == "unread" and "may be in vdb" in version["reason"], version
    # Nor is the readable part presented as the machine's own file system.
    assert "may be in vdb" in refusal(groups, "ls", "sealed/latest:/")
    (tmp_path / "key").write_text(KEY)
    (version,) = files(groups, "versions", "sealed:vg0-other/x", "--key-file", tmp_path / "key")["versions"]
    assert version["state"] == "absent", version
    shutil.rmtree(tmp_path)
