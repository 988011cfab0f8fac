"""coldrise check-boot on a whole system: proofs that its point boots, or that it does not."""

import subprocess

import pytest

from support import guest
from support.cli import Coldrise
from test_check_boot import MIB, STAGES, check, stages

# The guest's partition, as debugfs takes it.
PARTITION = f"?offset={MIB}"
UNITS = "/etc/systemd/system"


@pytest.fixture(scope="module")
def guests(tmp_path_factory):
    """A repository, and a function that backs up a guest with other files."""
    folder = tmp_path_factory.mktemp("guests")
    coldrise = Coldrise.encrypted(folder)
    coldrise.init()
    image = guest.image()

    def changed(name, requests=(), files=None):
        """Requests of debugfs, then files by their path."""
        requests = list(requests)
        for number, (path, text) in enumerate((files or {}).items()):
            source = folder / f"{name}.{number}"
            source.write_text(text, encoding="utf-8")
            source.chmod(0o755 if text.startswith("#!") else 0o644)
            requests.append(f"write {source} {path}")
        copy, script = folder / f"{name}.raw", folder / f"{name}.debugfs"
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        script.write_text("\n".join(requests), encoding="utf-8")
        subprocess.run(["/sbin/debugfs", "-w", "-f", script, f"{copy}{PARTITION}"], check=True, capture_output=True)
        address = coldrise.backup(name, vda=copy)
        copy.unlink()
        return address

    coldrise.changed = changed
    return coldrise


def check_guest(guests, address, *options):
    return check(guests, address, "--memory", "512M", "--cpus", "1", "--time-limit", "5m", *options)


def test_a_healthy_guest_reaches_its_login_and_its_service(guests, tmp_path):
    address = guests.changed("good", [
        f"mkdir {UNITS}/sockets.target.wants",
        f"symlink {UNITS}/sockets.target.wants/answer.socket {UNITS}/answer.socket"], {
        f"{UNITS}/answer.socket": "[Socket]\nListenStream=2222\nAccept=yes\n",
        f"{UNITS}/answer@.service": "[Service]\nExecStart=/bin/cat\nStandardInput=socket\n"})  # fmt: skip
    screenshot = tmp_path / "screen.png"
    status, checked = check_guest(guests, address, "--check-port", "2222", "--screenshot", screenshot)
    assert status == 0, checked
    assert checked["verdict"] == "ok" and checked["rung"] == "service" and not checked["failure"]
    assert stages(checked) == STAGES
    times = [reached["after_ms"] for reached in checked["rungs"]]
    assert times == sorted(times) and times[1] > 0
    assert "read from the disks" in checked["rungs"][1]["evidence"]
    assert "coldrise-guest login:" in checked["rungs"][4]["evidence"]
    assert checked["rungs"][5]["evidence"] == "port 2222 accepts connections"
    assert checked["serial_tail"][-1] == "coldrise-guest login:"
    picture = screenshot.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and checked["screenshot"] == str(screenshot)
    assert screenshot.stat().st_mode & 0o777 == 0o600


def test_a_kernel_panic_is_a_failure(guests):
    """Without its initial file system the kernel finds no root."""
    address = guests.changed("panic", ["unlink /initrd.img"])
    status, checked = check_guest(guests, address)
    assert status == 13, checked
    assert checked["verdict"] == "failed" and "Kernel panic" in checked["failure"]
    assert stages(checked) == STAGES[:3]
    assert any("Kernel panic" in line for line in checked["serial_tail"])


# In place of systemd. It answers as an agent does, and only to a request that was sent after its last answer was read:
# the request is repeated after three seconds.
PORTS = """#!/bin/bash
mount -t devtmpfs devtmpfs /dev
modprobe virtio_console
port() {
    until name=$(grep -lx "$1" /sys/class/virtio-ports/*/name); do sleep 0.1; done
    name=${name%/name}
    echo /dev/${name##*/}
}
exec 3<>$(port org.qemu.guest_agent.0) 4>$(port org.coldrise.check)
answered=
while :; do
    # Until the other side is there, it ends at once.
    read -r line <&3 || sleep 0.1
    case $line in
        *guest-sync*) echo "{\\"return\\": $(echo "$line" | sed 's/.*"id":\\([0-9]*\\).*/\\1/')}" >&3;;
        *guest-ping*)
            [ -z "$answered" ] || [ $((SECONDS - answered)) -lt 2 ] || echo ok all services run >&4
            echo '{"return": {}}' >&3
            answered=$SECONDS;;
    esac
done
"""


def test_a_machine_communicates_over_its_ports(guests):
    """A machine without a login prompt, but with an agent and a check of its own."""
    address = guests.changed("ports", ["rm /usr/sbin/init"], {"/usr/sbin/init": PORTS})
    status, checked = check_guest(guests, address, "--until", "service")
    assert status == 0, checked
    evidence = [reached["evidence"] for reached in checked["rungs"]]
    assert evidence[4:] == ["the guest agent answers", "the machine's own check: ok all services run"]
