"""How boot checks end: interrupts, kills, crashes, and what each leaves."""

import json
import os
import pathlib
import signal
import subprocess

import pytest

from support.foreground import children, is_running
from support.nbdserver import wait_until
from support.wallclock import BothClocks
from test_check_boot import HALT, MIB, SAY, boot_record, check, small

SESSION = "web01-check-boot-throwaway"
__all__ = ["small"]


@pytest.fixture
def running(coldrise, small):
    """A check that has started its machine, and the processes that it started."""
    process = coldrise.start("check-boot", small(boot_record(SAY + HALT)), "--memory", "64M",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    for line in process.stderr:
        if "firmware" in line:
            break
    assert process.poll() is None
    started = children(process.pid)
    assert len(started) == 2
    return process, started


def qemu_of(started):
    [qemu] = [child for child in started if "qemu" in os.readlink(f"/proc/{child}/exe")]
    return qemu


@pytest.mark.parametrize("send", [
    lambda process: process.terminate(),
    # Ctrl-C on a terminal.
    lambda process: os.killpg(process.pid, signal.SIGINT),
], ids=["SIGTERM", "Ctrl-C"])
def test_an_interrupted_check_discards_its_session(coldrise, running, send):
    process, started = running
    assert [s["session"] for s in coldrise.json("sessions")["sessions"]] == [SESSION]
    send(process)
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 130, messages
    assert coldrise.json("sessions") == {"sessions": []}
    assert not any(map(is_running, started))


@pytest.mark.parametrize("command", [["gc"], ["doctor"], ["check-boot", "web02/latest", "--memory", "64M",
                                                       "--until", "started"]],
                         ids=["gc", "doctor", "a check of another machine"])
def test_leftovers_of_a_killed_check_are_removed_automatically(coldrise, own_tmp, running, tmp_path, command):
    process, started = running
    (tmp_path / "other.raw").write_bytes(b"".ljust(MIB, b"\0"))
    coldrise.backup("web02", vda=tmp_path / "other.raw")
    kept = own_tmp / "coldrise-state"
    kept.mkdir()
    (kept / "lock").touch()
    folders = {path.name.split("-")[1] for path in own_tmp.iterdir()} - {"state"}
    assert folders == {"check", "nbdkit"}
    # While it lives, no command touches any of it.
    coldrise.run(*command)
    (session,) = coldrise.json("sessions")["sessions"]
    assert session["session"] == SESSION and not session["is_abandoned"]
    assert process.poll() is None and all(map(is_running, started))
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, started)), "the end of its children")
    (session,) = coldrise.json("sessions")["sessions"]
    assert session["is_abandoned"]
    done = coldrise.run(*command)
    assert done.returncode in (0, 1), done.stderr
    assert coldrise.json("sessions") == {"sessions": []}
    assert [path.name for path in own_tmp.iterdir()] == ["coldrise-state"]


def test_a_session_of_a_running_check_cannot_be_ended(coldrise, running):
    process, _started = running
    done = coldrise.run("unpublish", SESSION, "--discard")
    assert done.returncode == 11, done.stderr
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)
    assert coldrise.json("sessions") == {"sessions": []}


def test_the_next_check_removes_leftovers_of_a_killed_one(coldrise, running):
    process, started = running
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, started)), "the end of its children")
    (session,) = coldrise.json("sessions")["sessions"]
    assert session["session"] == SESSION
    status, checked = check(coldrise, session["address"], "--memory", "64M", "--until", "firmware")
    assert status == 0, checked


def test_a_crash_of_qemu_is_not_a_verdict(coldrise, running):
    process, started = running
    os.kill(qemu_of(started), signal.SIGKILL)
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 1 and "qemu-system-x86_64 ended" in messages
    assert coldrise.json("sessions") == {"sessions": []}


def test_one_check_of_a_machine_at_a_time(coldrise, running, tmp_path):
    process, _started = running
    (session,) = coldrise.json("sessions")["sessions"]
    clock = BothClocks(tmp_path)
    with clock.of(coldrise):
        second = coldrise.start("check-boot", session["address"], "--memory", "64M", stderr=subprocess.PIPE)
    assert clock.end_of(second) == 11 and SESSION in second.stderr.read()
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)


def test_the_disks_server_offers_this_session_only(coldrise, running):
    """A guest that broke out could speak to it."""
    process, started = running
    coldrise.publish(coldrise.json("sessions")["sessions"][0]["address"], "other")
    words = pathlib.Path(f"/proc/{qemu_of(started)}/cmdline").read_bytes().split(b"\0")
    node = json.loads(next(word for word in words if word.startswith(b"{") and b'"nbd"' in word))
    assert node["export"] == f"live/{SESSION}/vda"
    for export, is_there in [(node["export"], True), ("live/other/vda", False), ("", False)]:
        uri = f"nbd+unix:///{export}?socket={node['server']['path']}"
        done = subprocess.run(["nbdinfo", "--size", uri], capture_output=True, text=True, timeout=60,
                              check=False)
        assert (done.returncode == 0) == is_there, f"{export}: {done.stderr}"
    process.terminate()
    process.communicate(timeout=60)
    coldrise.json("unpublish", "other", "--discard")
