"""coldrise check-boot: proofs that a point boots, or that it does not. tests/guests has those with a whole system."""

import json
import os
import pathlib
import random
import socket
import subprocess
import time

import pytest

from support.cli import PROGRAM

MIB = 1 << 20
STAGES = ["started", "firmware", "kernel", "userspace", "login", "service"]
# A busy host needs one of the later ones.
LIMITS = "3s", "12s", "48s"

# mov dx,0x3f8; mov al,'!'; out dx,al
SAY = bytes.fromhex("baf803b021ee")
# halt: hlt; jmp halt
HALT = bytes.fromhex("f4ebfd")
# mov dx,0x3f8; mov al,'A'; again: out dx,al; jmp again
FLOOD = bytes.fromhex("baf803b041eeebfd")
# xor ax,ax; mov ds,ax; mov si,0x7c10; mov ah,0x42; mov dl,0x80; int 0x13; hlt; jmp to it; then
# what to read: 8 sectors from number 1536 on, to 0x8000
READ = bytes.fromhex("31c08ed8be107cb442b280cd13f4ebfd1000080000800000") + (1536).to_bytes(8, "little")
# cld; xor ax,ax; mov ds,ax; mov si,0x7c16; mov dx,0x3f8; next: lodsb; test al,al; jz halt;
# out dx,al; jmp next; halt: hlt; jmp halt; then the text
LOGIN = bytes.fromhex("fc31c08ed8be167cbaf803ac84c07403eeebf8f4ebfd") + b"web01 login: \0"
# jmp 0xf000:0xfff0
RESTART = bytes.fromhex("eaf0ff00f0")


def boot_record(code):
    return code.ljust(510, b"\0") + b"\x55\xaa"


@pytest.fixture
def small(coldrise, tmp_path):
    """Backs up a machine of one boot record."""
    def back_up(record):
        path = tmp_path / "disk.raw"
        path.write_bytes(record.ljust(MIB, b"\0"))
        return coldrise.backup("web01", vda=path)
    return back_up


def check(coldrise, address, *options):
    """The exit code and the final object. The session is always gone."""
    done = coldrise.run("--json", "check-boot", address, *options, timeout_s=360)
    assert coldrise.json("sessions") == {"sessions": []}
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert "error" in last or last["address"] == address, done.stderr
    return done.returncode, last


def stages(checked):
    return [reached["rung"] for reached in checked["rungs"]]


def check_late(coldrise, address, *options):
    """The same for what only the time limit ends: the shortest in which the machine shows its login."""
    for limit in LIMITS:
        code, checked = check(coldrise, address, "--memory", "64M", "--time-limit", limit, *options)
        if "login" in stages(checked):
            break
    return code, checked


# ---------------------------------------------------------------- machines of one sector


def test_a_disk_without_a_boot_record_is_a_failure(coldrise, small):
    status, checked = check(coldrise, small(b""), "--memory", "64M")
    assert status == 13
    assert checked["verdict"] == "failed" and checked["rung"] == "started"
    # Read from the pixels of the screen: this firmware writes nothing to the serial port.
    assert checked["failure"] == "screen: No bootable device."
    assert "not a bootable disk" in checked["screen_text"] and not checked["serial_tail"]


def test_a_silent_machine_is_inconclusive(coldrise, small):
    address = small(boot_record(HALT))
    status, checked = check(coldrise, address, "--memory", "64M", "--time-limit", "1s")
    assert status == 14
    assert checked["verdict"] == "not_proven" and checked["failure"] is None
    assert stages(checked) == ["started"]
    # For people. On a busy host the firmware takes seconds until it writes on the screen.
    for limit in LIMITS:
        done = coldrise.run("check-boot", address, "--memory", "64M", "--time-limit", limit)
        if "Booting from" in done.stdout:
            break
    assert done.returncode == 14 and "not proven" in done.stdout
    assert "started   after" in done.stderr and "Booting from Hard Disk" in done.stdout


def test_the_check_ends_at_the_requested_stage(coldrise, small):
    address = small(boot_record(SAY + HALT))
    status, checked = check(coldrise, address, "--memory", "64M", "--until", "firmware")
    assert status == 0
    assert checked["until"] == "firmware" and checked["rung"] == "firmware"
    assert checked["rungs"][1]["evidence"] == "serial port: !"


def test_a_machine_in_a_restart_loop_is_a_failure(coldrise, small):
    status, checked = check(coldrise, small(boot_record(RESTART)), "--memory", "64M")
    assert status == 13 and checked["failure"] == "the machine restarted 3 times"


def test_a_read_error_is_a_failure(coldrise, tmp_path):
    """A boot record that reads from damaged chunks."""
    disk = tmp_path / "disk.raw"
    disk.write_bytes(boot_record(READ).ljust(MIB // 2, b"\0") + random.Random(1).randbytes(MIB // 2))
    address = coldrise.backup("web01", vda=disk)
    chunks = max((coldrise.repository / "db").glob("*.sst"), key=lambda path: path.stat().st_size)
    stored = bytearray(chunks.read_bytes())
    assert len(stored) > MIB // 2
    for offset in range(1024, MIB // 2, 8192):
        stored[offset] ^= 1
    chunks.write_bytes(stored)
    status, checked = check(coldrise, address, "--memory", "64M")
    assert status == 13 and checked["failure"].startswith("a read of disk0 failed"), checked


def test_endless_output_is_bounded(coldrise, small):
    """A serial port that never ends a line."""
    address = small(boot_record(FLOOD))
    for limit in LIMITS:
        process = coldrise.start("--json", "check-boot", address, "--memory", "64M", "--until", "login",
                                 "--time-limit", limit, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        peak_kib = 0
        while process.poll() is None:
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            peak_kib = max([peak_kib, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
            time.sleep(0.05)
        output, _messages = process.communicate()
        assert process.returncode == 14 and peak_kib < 150_000
        tail = json.loads(output.strip().splitlines()[-1])["serial_tail"]
        if tail:
            break
    assert tail and all(set(line) == {"A"} and len(line) <= 1024 for line in tail)


# ----------------------------------------------------------------------- the own checks


@pytest.mark.parametrize("command, status, why", [
    ('test "$COLDRISE_ADDRESS" = "$COLDRISE_MACHINE/$COLDRISE_POINT"', 0, None),
    ("echo first >&2; printf 'no \\033[1mdatabase' >&2; exit 3", 13,
     "the command of --check failed: no database (exit code 3)"),
    ("/no/such/check", 14, "the command of --check could not run"),
    ("sleep 1000", 14, "the command of --check had not ended"),
], ids=["ok", "failed", "missing", "endless"])
def test_a_user_command_judges(coldrise, small, command, status, why):
    address, options = small(boot_record(LOGIN)), ("--check", command)
    if "sleep" in command:
        code, checked = check_late(coldrise, address, *options)
    else:
        code, checked = check(coldrise, address, "--memory", "64M", "--time-limit", "90s", *options)
    assert code == status, checked
    assert stages(checked) == (STAGES if status == 0 else STAGES[:5])
    reason = checked["failure"] if status == 13 else checked["note"]
    assert (reason or "").startswith(why or "") and bool(reason) == bool(why)
    if status == 0:
        assert checked["rungs"][5]["evidence"] == "the command of --check succeeded"


def test_a_command_waits_for_the_port(coldrise, small):
    """This machine has no network, so its port never answers."""
    code, checked = check_late(coldrise, small(boot_record(LOGIN)), "--check", "false", "--check-port", "22")
    assert code == 14 and stages(checked) == STAGES[:5] and checked["note"] is None


def test_a_lower_stage_than_usual_is_a_regression(coldrise, small):
    good = small(boot_record(LOGIN))
    silent = small(boot_record(HALT))
    later = "--memory", "64M", "--time-limit", "1s"
    assert check(coldrise, silent, *later)[1]["is_worse"] is False
    assert check(coldrise, good, "--memory", "64M", "--time-limit", "90s")[0] == 0
    status, checked = check(coldrise, silent, *later)
    assert status == 14 and checked["is_worse"] and checked["usual_rung"] == "login"
    (machine,) = coldrise.json("list")["machines"]
    assert [point.get("is_boot_worse", False) for point in machine["points"]] == [False, True]
    assert "not proven, worse" in coldrise.run("list").stdout
    shown = coldrise.run("show", silent).stdout
    assert "not proven, worse: started of login reached" in shown and "usual is login" in shown
    # A failure is a failure.
    failed = small(b"")
    status, checked = check(coldrise, failed, "--memory", "64M")
    assert status == 13 and not checked["is_worse"] and checked["usual_rung"] is None


# -------------------------------------------------------------------------- confinement

# In place of QEMU: tries what a guest that broke out would try.
SPY = """#!/bin/sh
try() { name=$1; shift; if "$@" >/dev/null 2>&1; then echo "reached $name" >&2; else echo "denied $name" >&2; fi; }
try usr cat /usr/share/seabios/vgabios-stdvga.bin
try passphrase cat %(passphrase)s
try repository ls %(repository)s
try markers ls %(repository)s/markers
try write sh -c 'echo >%(repository)s/new'
try home ls %(home)s
try environment cat /proc/%(pid)s/environ
try tmp ls /tmp
try runs ls %(runs)s
try kill kill -0 %(pid)s
try tcp /usr/bin/python3 -c 'import socket; socket.create_connection(("127.0.0.1", %(port)s))'
echo "variables $(env | grep -c COLDRISE)" >&2
printf 'title \\033]0;evil\\007 end\\n' >&2
exit 1
"""


@pytest.mark.encrypted
@pytest.mark.parametrize("command", ["check-boot", "boot", "boot --headless"])
def test_qemu_cannot_read_the_key(coldrise, small, tmp_path, command):
    address = small(boot_record(HALT))
    tools = tmp_path / "tools"
    tools.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    spy = tools / "qemu-system-x86_64"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        spy.write_text(SPY % {"passphrase": coldrise.passphrase_file, "port": port,
                              "repository": coldrise.repository, "home": pathlib.Path.home(),
                              "pid": os.getpid(),
                              "runs": runs}, encoding="utf-8")
        spy.chmod(0o755)
        environment = coldrise.environment()
        environment["PATH"] = f"{tools}:{environment['PATH']}"
        environment["COLDRISE_RUNS"] = str(runs)
        # The script itself can do all of it.
        free = subprocess.run([spy], capture_output=True, text=True, timeout=60, check=False)
        assert "denied" not in free.stderr
        (coldrise.repository / "new").unlink()
        done = subprocess.run([PROGRAM, *command.split(), address], capture_output=True, text=True,
                              env=environment, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 1 and "qemu-system-x86_64 ended" in done.stderr
    messages = [line.removeprefix("coldrise: qemu-system-x86_64: ") for line in done.stderr.splitlines()]
    assert "reached usr" in messages and "variables 0" in messages
    reached = {line for line in messages if line.startswith("reached ")}
    assert reached == {"reached usr"}, messages
    assert {line for line in messages if line.startswith("denied ")} == {
        f"denied {name}" for name in
        ["passphrase", "repository", "markers", "write", "home", "environment", "tmp", "runs", "kill", "tcp"]}
    assert not (coldrise.repository / "new").exists()
    if command != "boot":
        # What it says reaches no terminal as it is.
        assert "title  end" in messages and "\x1b" not in done.stderr


# ---------------------------------------------------------------------------- the record


def boot_files(coldrise):
    return sorted((coldrise.repository / "markers").glob("*.boot*"))


def verdicts(coldrise):
    (machine,) = coldrise.json("list")["machines"]
    return [point.get("boot") for point in machine["points"]]


def test_the_result_is_stored_with_its_point(coldrise, small, tmp_path):
    address = small(b"")
    none = coldrise.run("show", address, "--screenshot", tmp_path / "none.png")
    assert none.returncode == 1 and "check-boot" in none.stderr
    assert verdicts(coldrise) == [None]
    check(coldrise, address, "--memory", "64M")
    assert verdicts(coldrise) == ["failed"]
    lines = coldrise.run("list").stdout.splitlines()
    assert "BOOT" in lines[0] and " failed" in lines[1]
    shown = coldrise.json("show", address)["boot"]
    assert shown["failure"] == "screen: No bootable device." and shown["until"] == "login"
    text = coldrise.run("show", address).stdout
    assert "boot check   failed: started of login reached" in text
    picture = tmp_path / "screen.png"
    coldrise.json("show", address, "--screenshot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_mode & 0o777 == 0o600
    again = coldrise.run("show", address, "--screenshot", picture)
    assert again.returncode == 1 and "--force" in again.stderr
    coldrise.json("show", address, "--screenshot", picture, "--force")
    piped = subprocess.run([PROGRAM, "show", address, "--screenshot", "-"], capture_output=True,
                           env=coldrise.environment(), timeout=60, check=True)
    assert piped.stdout == picture.read_bytes()
    # The last check counts.
    check(coldrise, address, "--memory", "64M", "--until", "started")
    assert verdicts(coldrise) == ["ok"]
    (stored,) = boot_files(coldrise)
    assert stored.stat().st_size % (16 << 10) < 100 and b"bootable" not in stored.read_bytes()
    assert coldrise.json("verify")["is_clean"]
    coldrise.json("repair")
    assert verdicts(coldrise) == ["ok"]
    coldrise.json("forget", address)
    assert not boot_files(coldrise)


def test_a_damaged_result_is_named_and_replaced(coldrise, small):
    first = small(b"")
    check(coldrise, first, "--memory", "64M", "--until", "started")
    (stored,) = boot_files(coldrise)
    sound = stored.read_bytes()
    second = small(b"x")
    (other,) = [path for path in stored.parent.iterdir() if not path.suffix and path.stem != stored.stem]
    # Another point's result, and one of which the end is missing.
    for path, content in [(other.with_suffix(".boot"), sound), (stored, sound[:-1])]:
        path.write_bytes(content)
    assert verdicts(coldrise) == [None, None]
    assert "warning: the boot check" in coldrise.run("show", first).stderr
    done = coldrise.run("--json", "verify")
    damaged = json.loads(done.stdout.splitlines()[-1])["damaged_documents"]
    assert done.returncode == 1
    assert [entry["what"] for entry in damaged] == [f"the boot check of {p}" for p in (first, second)]
    # It keeps nothing from working.
    coldrise.json("gc")
    for address in (first, second):
        check(coldrise, address, "--memory", "64M", "--until", "started")
    assert coldrise.json("verify")["is_clean"]


# -------------------------------------------------------------------- before the start


def test_missing_requirements_are_named_before_the_start(coldrise, small, tmp_path):
    address = small(b"")
    memory = coldrise.run("check-boot", address, "--memory", "8T")
    assert memory.returncode == 3 and "not checked" in memory.stderr
    early = coldrise.run("check-boot", address, "--until", "login", "--check", "true")
    assert early.returncode == 2 and "leave out --until" in early.stderr
    disk = coldrise.run("check-boot", f"{address}/vda")
    assert disk.returncode == 2
    folder = coldrise.run("check-boot", address, "--screenshot", tmp_path / "no/such.png")
    assert folder.returncode == 1 and "no/such.png" in folder.stderr
    tools = tmp_path / "tools"
    tools.mkdir()
    done = subprocess.run([PROGRAM, "check-boot", address], capture_output=True, text=True,
                          env=coldrise.environment() | {"PATH": str(tools)}, timeout=60, check=False)
    assert done.returncode == 1 and "apt install qemu-system-x86" in done.stderr
    assert coldrise.json("sessions") == {"sessions": []}
