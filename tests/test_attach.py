"""coldrise attach and detach: an additional disk of a running machine."""

import json
import os
import signal
import socket
import subprocess
import threading

import pytest

from support.foreground import children
from support.image import Image
from support.machine import machine

MIB = 1 << 20


@pytest.fixture
def stored(coldrise, tmp_path):
    image = Image(4 * MIB)
    image.write(MIB, b"\x5a" * 65536)
    return coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))


@pytest.fixture
def attached(coldrise, clock):
    """A running attach with the clock, and its ready line."""
    def start(*words):
        with clock.of(coldrise):
            process = coldrise.start("--json", "attach", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, json.loads(line)

    return start


def test_a_point_is_read_only_and_unmounted_by_ctrl_c(coldrise, stored, attached, own_tmp):
    with machine(own_tmp) as host:
        process, ready = attached(stored, "--to", host.qmp, "--device", "scsi")
        assert (ready["event"], ready["name"], ready["is_read_only"]) == ("ready", "web01-vda", True)
        # No answer timed out: the limit is 10 s.
        assert ready["elapsed_ms"] < 10000
        node = host.node("coldrise-web01-vda")
        assert node["ro"] and node["image"]["virtual-size"] == 4 * MIB
        assert "65536/65536" in host.io("coldrise-web01-vda", "read -P 0x5a 1M 64k")
        again = coldrise.run("attach", stored, "--to", host.qmp, "--device", "scsi")
        assert again.returncode == 1 and "attached already" in again.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert json.loads(process.stdout.read().splitlines()[-1])["end"] == "detached"
        assert host.node("coldrise-web01-vda") is None
        assert host.process.poll() is None


def test_a_monitor_that_accepts_everything_is_not_trusted(coldrise, stored, own_tmp):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(own_tmp / "qmp"))
        listener.listen()

        def agree():
            with listener.accept()[0] as client, client.makefile("rwb") as lines:
                lines.write(b'{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":0}},"capabilities":[]}}\r\n')
                lines.flush()
                for line in lines:
                    lines.write(json.dumps({"return": {}, "id": json.loads(line).get("id")}).encode() + b"\r\n")
                    lines.flush()

        threading.Thread(target=agree, daemon=True).start()
        done = coldrise.run("attach", stored, "--to", f"qmp:{own_tmp}/qmp", "--device", "scsi")
    assert done.returncode == 1 and "does not have the disk" in done.stderr and "ready" not in done.stdout


def test_a_session_is_written_and_detached_by_name(coldrise, stored, attached, own_tmp, clock):
    coldrise.publish(stored, "fix")
    with machine(own_tmp) as host:
        process, ready = attached("live/fix", "--to", host.qmp, "--as", "repair", "--device", "scsi")
        assert not ready["is_read_only"]
        assert "4096/4096" in host.io("coldrise-repair", "write -P 0x77 2M 4k")
        # A killed server is started again, and QEMU connects to it again.
        [server] = children(process.pid)
        os.kill(server, signal.SIGKILL)
        assert "4096/4096" in host.io("coldrise-repair", "write -P 0x78 3M 4k")
        coldrise.json("detach", "repair", "--from", host.qmp)
        assert clock.end_of(process) == 0 and host.node("coldrise-repair") is None
        none = coldrise.run("detach", "repair", "--from", host.qmp)
        assert none.returncode == 1 and "no disk repair" in none.stderr
    target = own_tmp / "out.raw"
    coldrise.json("restore", "live/fix/vda", target)
    for at, pattern in ((2 * MIB, b"\x77"), (3 * MIB, b"\x78")):
        assert target.read_bytes()[at : at + 4096] == pattern * 4096


def test_leftovers_of_a_killed_attach_are_removed(coldrise, stored, attached, own_tmp, clock):
    coldrise.runs = own_tmp / "runs"
    with machine(own_tmp) as host:
        process, _ = attached(stored, "--to", host.qmp, "--device", "scsi")
        process.kill()
        process.wait()
        monitor = host.qmp.removeprefix("qmp:")
        output = coldrise.run("doctor").stdout
        assert "nothing serves it" in output and f"coldrise detach web01-vda --from qmp:{monitor}" in output, output
        coldrise.json("detach", "web01-vda", "--from", host.qmp)
        assert host.node("coldrise-web01-vda") is None
        assert "nothing serves it" not in coldrise.run("doctor").stdout
        process, _ = attached(stored, "--to", host.qmp, "--device", "scsi")
        # This one is served, under the name of the killed one.
        assert "nothing serves it" not in coldrise.run("doctor").stdout
        host.end()
        # The machine is gone, and so is the command.
        assert clock.end_of(process) == 0
        assert "nothing serves it" not in coldrise.run("doctor").stdout


def test_refusals_leave_nothing_in_the_machine(coldrise, stored, attached, own_tmp, clock):
    """A q35 machine takes virtio disks on root ports only, and a guest that does not run releases none."""
    port = ("-device", "pcie-root-port,id=port1,slot=1")
    with machine(own_tmp, "-machine", "q35", *port) as host:
        first, _ = attached(stored, "--to", host.qmp, "--as", "one")
        assert host.node("coldrise-one")
        second = coldrise.run("attach", stored, "--to", host.qmp, "--as", "two")
        assert second.returncode == 1 and "pcie-root-port" in second.stderr, second.stderr
        assert host.node("coldrise-two") is None
        for words, code, reason in [
            (("--to", "web01"), 2, "qmp:SOCKET"),
            (("--to", host.qmp, "--as", "a b"), 2, "name of an attached disk"),
            (("--to", f"qmp:{own_tmp}/absent"), 1, "absent"),
        ]:
            done = coldrise.run("attach", stored, *words)
            assert done.returncode == code and reason in done.stderr, done.stderr
        assert first.poll() is None
        host.end()
        clock.end_of(first)
