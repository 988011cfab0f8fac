"""backup --on: a user without root, a guest that is frozen for the instant, a slow and lossy line, two servers."""

import contextlib
import json
import shutil
import subprocess

import pytest

from support import uefi
from support.domain import Domain
from support.libvirt import MEMBER, QEMU_USER
from support.line import Line
from support.nbdserver import wait_until
from support.running import MIB, TICKING_SECTOR, assert_same_as_now
from support.ssh_host import SshHost
from support.virsh import on, path_with_virsh


@pytest.fixture(scope="module")
def hv1():
    with contextlib.closing(SshHost()) as started:
        yield started


@pytest.fixture
def host(hv1):
    yield hv1
    hv1.libvirt.clear()
    assert not list(hv1.scratch.iterdir())
    hv1.keys.write_text("", encoding="utf-8")


def backup(coldrise, machine, *options):
    return coldrise.json("backup", machine, "--from", "libvirt", "--on", "hv1", *options)


def test_a_user_without_root(coldrise, tmp_path):
    with contextlib.closing(SshHost(MEMBER)) as host:
        host.add_to(coldrise)
        contact = coldrise.json("host", "check", "hv1")["hosts"][0]["contact"]
        named = [one for one in contact["shortcomings"] if "KVM" not in one and "/dev/kvm" not in one and "processor" not in one]
        assert len(named) == 1 and "firmware variables and the state of a TPM" in named[0], contact
        running = Domain(host.libvirt, "web01")
        running.write("vda", "write -P 1 0 3M")
        made = backup(coldrise, "web01")
        assert_same_as_now(coldrise, made["address"], running, tmp_path)
        running.write("vdb", "write -P 2 1M 1M")
        made = backup(coldrise, "web01")
        assert [disk["read_bytes"] for disk in made["disks"]] == [0, MIB] and made["instant"]["remarks"] == []
        assert_same_as_now(coldrise, made["address"], running, tmp_path)

        attached = Domain(host.libvirt, "db01", sector=TICKING_SECTOR)
        there = ["libvirt:db01", "--on", "hv1"]
        process = coldrise.start("--json", "attach", f"{made['address']}/vda", "--to", *there, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = process.stdout.readline()
        assert json.loads(line or "{}").get("event") == "ready", line + process.stderr.read()
        assert "vdz" in host.libvirt.virsh("domblklist", "db01")
        done = coldrise.run("detach", "web01-vda", "--from", *there)
        assert done.returncode == 0 and "vdz" not in host.libvirt.virsh("domblklist", "db01"), done.stderr
        assert process.wait(timeout=60) == 0
        attached.goes_on()

        disk, xml = host.libvirt.images / "acme.raw", tmp_path / "acme.xml"
        disk.write_bytes(bytes(MIB))
        shutil.chown(disk, QEMU_USER)
        xml.write_text(uefi.domain(disk), encoding="utf-8")
        host.libvirt.virsh("create", "--paused", str(xml))
        remarks = "\n".join(backup(coldrise, "acme")["instant"]["remarks"])
        for part in ("firmware variables", "state of the TPM"):
            assert f"not in this point: the machine's {part}" in remarks, remarks
        assert coldrise.json("list", "acme", "--parts")["parts"] == []
        assert not list(host.scratch.iterdir())


def test_a_guest_is_frozen_for_the_instant_only(coldrise, host, tmp_path):
    host.add_to(coldrise)
    done, frozen, hold = tmp_path / "done", tmp_path / "frozen", tmp_path / "hold"
    done.touch()
    # No guest with an agent: virsh answers for it.
    agent = "\n".join([
        on("domfsfreeze", f"echo freeze >> {done}; touch {frozen}; echo 'Froze 1 filesystem(s)'; exit 0"),
        on("domfsthaw", f"echo thaw >> {done}; if rm {frozen} 2>/dev/null; then n=1; else n=0; fi; echo \"Thawed $n filesystem(s)\"; exit 0"),
        on("backup-begin", f"echo begin >> {done}; while [ -e {hold} ]; do sleep 0.05; done"),
    ])
    host.stop()
    host.start(path=path_with_virsh(tmp_path, agent))
    running = Domain(host.libvirt, "web01")
    made = backup(coldrise, "web01", "--quiesce")
    assert made["instant"]["is_quiesced"] and made["instant"]["remarks"] == []
    assert done.read_text(encoding="utf-8").split() == ["thaw", "freeze", "begin", "thaw"]
    # The server ends while the guest is frozen.
    hold.touch()
    with coldrise.start("backup", "web01", "--from", "libvirt", "--on", "hv1", "--quiesce", stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: done.read_text(encoding="utf-8").split()[-1] == "begin", "the instant")
        assert frozen.exists()
        process.kill()
    wait_until(lambda: not frozen.exists(), "the thaw")
    hold.unlink()
    wait_until(lambda: not host.sessions(), "the end of the program on the host")
    made = backup(coldrise, "web01", "--quiesce")
    assert made["instant"]["is_quiesced"]
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    host.stop()
    host.start()


def test_a_slow_and_lossy_line(coldrise, tmp_path):
    with contextlib.closing(Line(tmp_path)) as line, contextlib.closing(SshHost(line=line)) as host:
        coldrise.wrap = line.near.command
        host.add_to(coldrise)
        running = Domain(host.libvirt, "web01")
        assert coldrise.json("host", "check", "hv1")["hosts"][0]["running"] == ["web01"]
        running.write("vda", "write -P 1 0 8M")
        made = backup(coldrise, "web01")
        assert_same_as_now(coldrise, made["address"], running, tmp_path)
        running.write("vda", "write -P 2 4M 1M")
        made = backup(coldrise, "web01")
        assert [disk["read_bytes"] for disk in made["disks"]] == [MIB, 0]
        assert_same_as_now(coldrise, made["address"], running, tmp_path)
        assert sum(counters.lost for counters in line.counters()) > 0


def test_two_servers_back_up_one_host(coldrise, other, host, tmp_path):
    # Both copy the program there.
    shutil.rmtree(host.cache, ignore_errors=True)
    servers = {"web01": coldrise, "db01": other}
    domains = {name: Domain(host.libvirt, name) for name in servers}
    for name, server in servers.items():
        host.add_to(server)
        domains[name].write("vda", "write -P 5 0 8M")

    def at_once(machines):
        started = [server.start("backup", machine, "--from", "libvirt", "--on", "hv1", stderr=subprocess.PIPE)
                   for server, machine in machines]
        said = [process.communicate(timeout=120)[1] for process in started]
        return [process.returncode for process in started], said

    codes, said = at_once([(coldrise, "web01"), (other, "db01")])
    assert codes == [0, 0], said
    codes, said = at_once([(coldrise, "web01"), (other, "web01")])
    # libvirt has one job for each machine: the other server is told so.
    assert set(codes) <= {0, 11} and 0 in codes, said
    made = [backup(server, "web01")["address"] for server in servers.values()]
    for server, address in zip(servers.values(), made):
        assert_same_as_now(server, address, domains["web01"], tmp_path)
    assert len(domains["web01"].checkpoints()) == 2 and not domains["web01"].has_job()
