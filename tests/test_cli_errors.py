"""Mistakes and damage: exit codes, and messages with cause, place and advice."""

import json
import os
import shutil
import subprocess

import nbd
import pytest

from support.cli import PROGRAM, Coldrise
from support.image import Image
from support.nbdserver import read_all

pytestmark = pytest.mark.encrypted

MIB = 1 << 20


def refused(coldrise, code, kind, *arguments):
    """The message of a command that has to fail so, the same on stdout and stderr."""
    done = coldrise.run("--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    error = json.loads(done.stdout.strip().splitlines()[-1])["error"]
    assert error["kind"] == kind, error
    assert done.stderr.startswith("coldrise: ") and "warning" not in done.stderr
    assert error["message"] in done.stderr
    return error["message"]


def test_wrong_passphrase(coldrise, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("battery staple\n", encoding="utf-8")
    other = Coldrise(coldrise.repository, wrong)
    for command in (["list"], ["stats"], ["backup", "web01", "vda=raw:/dev/null"],
                    ["serve", "nbd", "--socket", tmp_path / "socket"]):
        message = refused(other, 12, "wrong_passphrase", *command)
        assert str(coldrise.repository) in message


def everything_in(folder):
    """Name and content of all files; sockets have none."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_wrong_passphrase_changes_nothing(coldrise, tmp_path):
    image = Image(MIB)
    image.fill(0, MIB // 2, "content")
    source = image.save(tmp_path / "vda.raw")
    point = coldrise.backup("web01", vda=source)
    coldrise.publish(point, "trial")
    wrong, other = tmp_path / "wrong", tmp_path / "other"
    for path in (wrong, other):
        path.write_text(f"{path.name} staple\n", encoding="utf-8")
    before = everything_in(coldrise.repository)
    commands = [
        ["backup", "web01", f"vda=raw:{source}"], ["list"], ["show", point], ["stats"],
        ["publish", point, "--name", "second"], ["sessions"], ["seal", "trial"],
        ["unpublish", "trial", "--discard"], ["restore", f"{point}/vda", tmp_path / "out.raw"],
        ["protect", point], ["unprotect", point], ["quarantine", point],
        ["release", point], ["forget", point], ["prune", "--keep-last", "1"], ["verify"],
        ["repair"], ["fold"], ["gc"], ["gc", "--dry-run"],
        ["key", "add", "second", "--new-passphrase-file", other],
        ["key", "rotate", "--new-passphrase-file", other], ["key", "remove", "second"],
    ]  # fmt: skip
    for user in (Coldrise(coldrise.repository, wrong), Coldrise(coldrise.repository)):
        for command in commands:
            refused(user, 12, "wrong_passphrase", *command)
            assert everything_in(coldrise.repository) == before, command
    assert not (tmp_path / "out.raw").exists()


def test_only_one_of_two_concurrent_inits_succeeds(tmp_path):
    source = Image(MIB).save(tmp_path / "vda.raw")
    for number in range(8):
        repository = Coldrise(tmp_path / f"repository{number}")
        both = [repository.start("init", "--no-encryption", stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE) for _ in range(2)]  # fmt: skip
        ended = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
        (message, code) = max(ended, key=lambda end: end[1])
        assert sorted(end[1] for end in ended) == [0, code] and code != 0, ended
        assert "already holds a repository" in message
        repository.backup("web01", vda=source)
        assert repository.json("verify")["is_clean"]


def test_directories_missing_in_a_copy_are_recreated(coldrise, tmp_path):
    image = Image(MIB)
    image.fill(0, MIB // 2, "content")
    source = image.save(tmp_path / "vda.raw")
    point = coldrise.backup("web01", vda=source)
    for name in ("layers", "live", "leases"):
        shutil.rmtree(coldrise.repository / name)
    assert coldrise.json("verify")["is_clean"]
    for name in ("layers", "live", "leases"):
        shutil.rmtree(coldrise.repository / name)
    coldrise.publish(point, "trial")
    for name in ("layers", "live"):
        shutil.rmtree(coldrise.repository / name)
    # Its content is missing.
    assert coldrise.run("verify").returncode == 1
    assert coldrise.run("gc").returncode == 1
    coldrise.json("unpublish", "trial", "--discard")
    coldrise.json("gc")
    coldrise.backup("web01", vda=source)
    assert coldrise.json("verify")["is_clean"]


def test_an_answer_that_cannot_be_written_is_a_failure(coldrise):
    with open("/dev/full", "w", encoding="utf-8") as full:
        for arguments in (["list"], ["--json", "verify"], ["gc"]):
            process = coldrise.start(*arguments, stdout=full, stderr=subprocess.PIPE)
            message = process.communicate(timeout=60)[1]
            assert process.returncode == 1 and "No space left on device" in message, arguments
            assert "the command is done" in message, message


def test_an_answer_that_cannot_be_written_leaves_a_point(coldrise, point, image, tmp_path):
    source = image.save(tmp_path / "again.raw")
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = coldrise.start("backup", "db01", f"vda=raw:{source}", stdout=full,
                                 stderr=subprocess.PIPE)
        message = process.communicate(timeout=60)[1]
    ((made,),) = [machine["points"] for machine in coldrise.json("list")["machines"]
                  if machine["machine"] == "db01"]
    assert process.returncode == 1 and f"made restore point {made['address']}" in message, message


def test_a_missing_passphrase_is_reported(coldrise):
    message = refused(Coldrise(coldrise.repository), 12, "wrong_passphrase", "list")
    assert "--passphrase-file" in message


def test_passphrase_of_an_open_repository(tmp_path):
    plain = Coldrise(tmp_path / "plain")
    plain.init("--no-encryption")
    assert plain.json("list") == {"machines": [], "lost": []}
    secret = tmp_path / "secret"
    secret.write_text("x\n", encoding="utf-8")
    refused(Coldrise(plain.repository, secret), 12, "wrong_passphrase", "list")


def test_passphrase_sources(coldrise, tmp_path):
    unset = Coldrise(coldrise.repository)
    unset.json("--passphrase-file", coldrise.passphrase_file, "list")
    unset.json("--passphrase-command", f"cat {coldrise.passphrase_file}", "list")
    refused(unset, 1, "not_found", "--passphrase-file", tmp_path / "absent", "list")
    refused(unset, 1, "tool_failed", "--passphrase-command", "exit 3", "list")
    environment = coldrise.environment() | {"COLDRISE_PASSPHRASE_COMMAND": "echo x"}
    done = subprocess.run([PROGRAM, "list"], env=environment, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 2
    assert "COLDRISE_PASSPHRASE_FILE and COLDRISE_PASSPHRASE_COMMAND" in done.stderr


def test_missing_repository(tmp_path):
    absent = Coldrise(tmp_path / "absent")
    for command in (["list"], ["publish", "web01/latest"], ["seal", "trial"],
                    ["backup", "web01", "vda=raw:/dev/null"], ["gc"], ["doctor"]):
        if command == ["doctor"]:
            assert absent.run(*command).returncode == 10
            continue
        message = refused(absent, 10, "no_repository", *command)
        assert str(tmp_path / "absent") in message and "coldrise init" in message
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(Coldrise(empty), 10, "no_repository", "gc")
    assert list(empty.iterdir()) == []


def test_foreign_repository(coldrise):
    description = coldrise.repository / "repository.json"
    original = description.read_text(encoding="utf-8")
    for content in ("", "[]", "hello", original[: len(original) // 2],
                    original.replace('"format_version": 2', '"format_version": 1'),
                    original.replace('"format_version": 2', '"format_version": 99'),
                    original.replace('"chunk_size_bytes": 16384', '"chunk_size_bytes": 65536')):
        assert content != original
        description.write_text(content, encoding="utf-8")
        done = coldrise.run("--json", "list")
        assert done.returncode == 1, content
        assert json.loads(done.stdout)["error"]["kind"] in ("corrupt", "unsupported")
        assert "repository.json" in done.stderr
        # A repair corrects a single bit only.
        assert "run coldrise repair" not in done.stderr, done.stderr
    description.write_text(original, encoding="utf-8")
    assert coldrise.json("list") == {"machines": [], "lost": []}


def test_init_does_not_change_existing_files(coldrise, tmp_path):
    message = refused(coldrise, 1, "already_exists", "init")
    assert "already holds a repository" in message
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter").write_text("dear", encoding="utf-8")
    refused(Coldrise(foreign, coldrise.passphrase_file), 1, "already_exists", "init")
    assert os.listdir(foreign) == ["letter"]


@pytest.mark.parametrize("options", [
    ["--chunk-size", "5K"], ["--chunk-size", "2K"], ["--chunk-size", "512K"], ["--chunk-size", "x"],
    ["--compression", "gzip"], ["--compression", "zstd:20"], ["--no-encryption"],
])
def test_init_refuses_impossible_settings(coldrise, tmp_path, options):
    other = Coldrise(tmp_path / "other", coldrise.passphrase_file)
    refused(other, 2, "invalid_input", "init", *options)
    assert not other.repository.exists()


def test_init_requires_a_passphrase(tmp_path):
    message = refused(Coldrise(tmp_path / "other"), 2, "invalid_input", "init")
    assert "--no-encryption" in message


def test_unknown_addresses_list_the_existing_ones(coldrise, point):
    assert "web01" in refused(coldrise, 1, "not_found", "show", "db01/latest")
    assert "web01" in refused(coldrise, 1, "not_found", "list", "db01")
    exact = point.split("/")[1]
    for command in ("show", "publish"):
        message = refused(coldrise, 1, "not_found", command, "web01/20010101T000000Z")
        assert exact in message
    assert exact in refused(coldrise, 1, "not_found", "show", "web01/latest~1")
    assert "vda" in refused(coldrise, 1, "not_found", "show", "web01/latest/vdb")
    assert "vda" in refused(coldrise, 1, "not_found", "restore", "web01/latest/vdb", "/nowhere.raw")
    for command in (["seal", "trial"], ["unpublish", "trial"], ["boot", "live/trial"],
                    ["show", "live/trial"]):
        assert "trial" in refused(coldrise, 1, "not_found", *command)


@pytest.mark.parametrize("arguments", [
    ["show", "../etc/passwd"], ["show", "web01/../vda"], ["show", "web01/latest/.."],
    ["show", "Web01/latest"], ["show", "web01"], ["show", "web01/latest/vda/x"],
    ["show", "web01/latest~0"], ["show", "live/.."], ["show", ""], ["show", "web01/2026"],
    ["list", "live"], ["list", ".hidden"], ["seal", "a/b"], ["seal", "x" * 64],
    ["publish", "web01/latest/vda"], ["publish", "live/trial"],
    ["publish", "web01/latest", "--name", "../trial"],
    ["publish", "web01/latest", "--name", "latest"],
    ["backup", "..", "vda=raw:x"], ["backup", "web01", "../vda=raw:x"],
    ["backup", "web01", "vda=x.iso"], ["backup", "web01", "x.raw"],
    ["backup", "web01", "vda=raw:x", "vda=raw:y"], ["backup", "web01", "vda=http://host/x.raw"],
    ["diff", "web01/latest", "web01/latest/vda"], ["boot", "web01/latest/vda"],
    ["boot", "web01/latest", "--memory", "1M"], ["boot", "web01/latest", "--cpus", "0"],
    ["restore", "web01/latest", "x.unknown"], ["restore", "web01/latest", "ftp://host/x"],
    ["restore", "web01/latest", "x.raw", "--format", "iso"],
    ["serve", "nbd", "--listen", "0.0.0.0:10809"], ["serve", "nbd", "--listen", "localhost"],
    ["serve", "nbd", "--cache", "lots"],
])
def test_invalid_requests_are_refused(coldrise, point, arguments):
    refused(coldrise, 2, "invalid_input", *arguments)
    assert coldrise.json("sessions") == {"sessions": []}


@pytest.mark.parametrize("arguments", [
    [], ["frobnicate"], ["list", "--frob"], ["backup"], ["backup", "web01"], ["seal"],
    ["unpublish", "a", "--discard", "--discard"], ["-q", "-v", "list"],
    ["serve"], ["serve", "ftp"], ["serve", "nbd", "--listen", "127.0.0.1:1", "--socket", "x"],
    ["completion", "cmd"], ["boot", "web01/latest", "--seal", "--discard"],
    ["--passphrase-file", "a", "--passphrase-command", "b", "list"],
])
def test_wrong_usage(coldrise, arguments):
    done = coldrise.run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("coldrise: ") or "Usage:" in done.stderr


def test_a_missing_repository_option_is_reported(coldrise):
    environment = coldrise.environment()
    del environment["COLDRISE_REPO"]
    done = subprocess.run([PROGRAM, "list"], env=environment, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 2
    assert "--repo" in done.stderr and "COLDRISE_REPO" in done.stderr


def test_damage_is_reported_and_never_returned(coldrise, nbdkit, tmp_path):
    image = Image(4 * MIB)
    image.fill(0, 4 * MIB, "content")
    point = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    # Not in the log, which is replayed, but in the files that it went into.
    coldrise.backup("db01", vda=image.save(tmp_path / "vda.raw"))
    files = [path for path in (coldrise.repository / "db").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    target = tmp_path / "out.raw"
    message = refused(coldrise, 1, "corrupt", "restore", f"{point}/vda", target)
    assert "chunk" in message and "offset" in message and "coldrise verify" in message
    assert not target.exists()
    with nbdkit() as server, server.connect(f"{point}/vda") as client:
        with pytest.raises(nbd.Error):
            read_all(client)
    logged = [line for line in server.messages().splitlines() if "chunk" in line]
    assert logged and all(f"{point}/vda: chunk " in line for line in logged), logged


def test_a_missing_layer_is_reported(coldrise, point, live, nbdkit):
    with nbdkit() as server, server.connect(live) as client:
        client.pwrite(b"x" * 4096, 0)
        client.flush()
    sealed = coldrise.json("unpublish", "trial")["address"]
    layers = list((coldrise.repository / "layers").iterdir())
    assert len(layers) == 1
    layers[0].unlink()
    target = coldrise.repository.parent / "out.raw"
    done = coldrise.run("restore", f"{sealed}/vda", target)
    assert done.returncode == 1 and not target.exists()
    assert layers[0].name in done.stderr or "layer" in done.stderr
    checked = coldrise.run("doctor")
    assert checked.returncode == 1
    assert "FAIL" in checked.stdout and f"{sealed}/vda" in checked.stdout
    # Commands that do not need it work.
    coldrise.json("restore", f"{point}/vda", target)


@pytest.mark.parametrize(("arguments", "words"), [
    (["plan", "99999999T"], ["99999999T is too large", "16777216T"]),
    (["backup", "web01", "vda=foo:/path"], ["'foo:' is not an image format", "qcow2:"]),
])
def test_wrong_sizes_and_formats_are_refused_with_the_choices(coldrise, arguments, words):
    done = coldrise.run(*arguments)
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr


def test_a_usage_line_hides_options_set_by_the_environment(coldrise):
    done = coldrise.run("backup")
    assert done.returncode == 2 and "Usage: coldrise backup" in done.stderr
    assert "--repo" not in done.stderr


def test_doctor_detects_a_wrong_passphrase(coldrise, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("battery staple\n", encoding="utf-8")
    done = Coldrise(coldrise.repository, wrong).run("doctor")
    assert done.returncode == 12 and "FAIL" in done.stdout
