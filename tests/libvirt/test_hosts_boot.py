"""coldrise check-boot --on: the machine runs on another host, reached over SSH, and everything else here."""

import contextlib
import json
import os
import subprocess

from support.foreground import is_running
from support.nbdserver import wait_until
from test_check_boot import HALT, LOGIN, SAY, boot_record, check, small, stages
from test_hosts import host, hv1, refused, running_hosts

__all__ = ["host", "hv1", "refused", "running_hosts", "small"]
ON = "--on", "hv1", "--memory", "64M"


def machines(host):
    """The processes of QEMU on that host."""
    listed = subprocess.run(["pgrep", "-f", "qemu-system-x86_64.*coldrise-backup"], capture_output=True, text=True, check=False)
    mine = os.readlink(f"/proc/{host.libvirt.process.pid}/ns/mnt")
    found = []
    for number in map(int, listed.stdout.split()):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{number}/ns/mnt") == mine:
                found.append(number)
    return found


def test_a_machine_boots_on_another_host(coldrise, host, small):
    # With a port, which is reached through SSH.
    address = small(boot_record(LOGIN))
    status, checked = check(coldrise, address, *ON, "--until", "login", "--check-port", "22")
    assert status == 0 and stages(checked)[-1] == "login", checked
    assert any("web01 login:" in line for line in checked["serial_tail"])
    wait_until(lambda: not host.sessions(), "the end of the program on the host")
    # Read from the picture that QEMU made there.
    status, checked = check(coldrise, small(b""), *ON)
    assert status == 13 and checked["failure"] == "screen: No bootable device.", checked


def test_a_lost_connection_gives_no_verdict(coldrise, host, small):
    address = small(boot_record(SAY + HALT))
    with coldrise.start("check-boot", address, *ON, stderr=subprocess.PIPE) as process:
        next(line for line in process.stderr if "firmware" in line)
        started = machines(host)
        assert len(started) == 1
        host.stop()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "host hv1 is lost" in said, said
    wait_until(lambda: not any(map(is_running, started)), "the end of QEMU")
    assert coldrise.json("sessions") == {"sessions": []}
    assert not coldrise.json("show", address).get("boot")
    host.start()
    # It also removes what was left there.
    done = coldrise.run("--json", "bisect", "web01", *ON, "--until", "firmware")
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 14 and found["last_good"] == address and found["boots"] == 1, done.stderr


def test_a_host_without_qemu(host, small, refused):
    address = small(boot_record(HALT))
    program = "/usr/bin/qemu-system-x86_64"
    subprocess.run([*host.libvirt.inside(), "mount", "--bind", "/dev/null", program], check=True)
    try:
        assert "host hv1: qemu-system-x86_64 is not installed" in refused("check-boot", address, *ON)[1]
    finally:
        subprocess.run([*host.libvirt.inside(), "umount", program], check=True)
    assert "there is no host hv7" in refused("check-boot", address, "--on", "hv7")[1]
