"""coldrise host, and backup --on: machines of another host, reached over SSH."""

import contextlib
import re
import signal
import socket
import subprocess

import pytest

from support.domain import Domain
from support.nbdserver import DEADLINE_S, wait_until
from support.off import assert_same, bitmaps, write
from support.running import MIB, assert_same_as_now
from support.sources import RunningBackup
from support.ssh_host import SshHost


@pytest.fixture(scope="module")
def running_hosts():
    """The host of all tests, in a list. After a test that failed, the next one starts another host."""
    hosts = []
    yield hosts
    for host in hosts:
        host.close()


@pytest.fixture
def hv1(running_hosts, request):
    """Clean before and after each test."""
    if not running_hosts:
        running_hosts.append(SshHost())
    yield running_hosts[0]
    if request.node.is_failed:
        running_hosts.pop().close()
        return
    running_hosts[0].libvirt.clear()
    assert not list(running_hosts[0].scratch.iterdir())
    running_hosts[0].keys.write_text("", encoding="utf-8")


@pytest.fixture
def host(hv1, coldrise):
    """Known to the repository."""
    hv1.add_to(coldrise)
    return hv1


@pytest.fixture
def backup(coldrise, host):
    def run(*options, machine="web01"):
        return coldrise.json("backup", machine, "--from", "libvirt", "--on", "hv1", *options)

    return run


@pytest.fixture
def refused(coldrise):
    def run(*words):
        done = coldrise.run(*words)
        assert done.returncode not in (0, 101), done.stdout
        return done.returncode, done.stderr

    return run


def test_a_host_is_added_checked_and_removed(coldrise, hv1, refused):
    added = coldrise.run("host", "add", "hv1", hv1.address)
    assert added.returncode == 0, added.stderr
    key = subprocess.run(["ssh-keygen", "-lf", hv1.folder / "host_key.pub"], capture_output=True, text=True, check=True)
    assert key.stdout.split()[1] in added.stdout
    line = next(line for line in added.stdout.splitlines() if line.startswith("restrict,port-forwarding ssh-ed25519 "))
    assert line == coldrise.json("host", "key")["authorized_keys"]
    code, said = refused("host", "check")
    assert code == 1 and "does not accept this repository's key" in said and "authorized_keys" in said
    assert coldrise.json("host", "list")["hosts"][0]["last_check"]["contact"] is None
    assert "there is a host hv1 already" in refused("host", "add", "hv1", hv1.address)[1]
    hv1.keys.write_text(line + "\n", encoding="utf-8")
    Domain(hv1.libvirt, "web01")
    checked = coldrise.json("host", "check", "hv1")["hosts"][0]
    assert checked["running"] == ["web01"] and re.match(r"\d+\.\d+", checked["contact"]["qemu"])
    assert coldrise.json("host", "list")["hosts"][0]["last_check"]["contact"]["machines"] == ["web01"]
    assert "hv1" in coldrise.run("host", "list").stdout
    hv1.libvirt.clear()
    coldrise.json("host", "remove", "hv1")
    assert coldrise.json("host", "list")["hosts"] == []
    assert "there is no host hv1" in refused("host", "check", "hv1")[1]
    wrong = refused("host", "add", "hv1", hv1.address, "--fingerprint", "SHA256:" + "A" * 43)
    assert "it was not added" in wrong[1] and coldrise.json("host", "list")["hosts"] == []
    for address in ("hv1", "ssh://-oProxyCommand=touch", "ssh://a b"):
        assert "is not the address of a host" in refused("host", "add", "x", address)[1]


def test_only_changed_blocks_come_over_ssh(coldrise, host, backup, tmp_path):
    running = Domain(host.libvirt, "web01")
    running.write("vda", "write -P 17 0 20M")
    full = backup()
    assert full["disks"][0]["read_bytes"] >= 20 * MIB and not full["instant"]["remarks"]
    assert_same_as_now(coldrise, full["address"], running, tmp_path)
    running.write("vda", "write -P 18 8M 1M")
    running.write("vdb", "write -P 19 63M 1M")
    part = backup()
    assert [disk["read_bytes"] for disk in part["disks"]] == [MIB, MIB]
    assert_same_as_now(coldrise, part["address"], running, tmp_path)
    assert len(running.checkpoints()) == 1 and not running.has_job()
    wait_until(lambda: not host.sessions(), "the end of the program on the host")
    programs = list(host.cache.iterdir())
    assert len(programs) == 1 and programs[0].stat().st_size <= 4 << 20


def test_another_key_of_the_host_is_refused(host, refused):
    host.stop()
    host.new_key()
    host.start()
    code, said = refused("backup", "web01", "--from", "libvirt", "--on", "hv1")
    assert code == 1 and "its SSH key differs from the one at host add: nothing was sent to it" in said
    assert not host.cache.exists() or not host.sessions()


def test_a_host_that_forbids_forwarding(coldrise, host, backup, tmp_path):
    host.stop()
    host.start("DisableForwarding yes")
    running = Domain(host.libvirt, "web01")
    running.write("vda", "write -P 17 0 5M")
    made = backup()
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    host.stop()
    host.start()


def test_limits_of_sshd_are_named(host, refused):
    Domain(host.libvirt, "web01")
    for more, words in (("DisableForwarding yes\nMaxSessions 1", "raise MaxSessions"), ("MaxSessions 0", "MaxSessions 0"),
                        ("ForceCommand echo no account here; exit 1", "its login shell says: no account here")):
        host.stop()
        host.start(more)
        code, said = refused("backup", "web01", "--from", "libvirt", "--on", "hv1")
        assert code == 1 and words in said, said
    host.stop()
    host.start("MaxStartups 1")
    with contextlib.ExitStack() as near:
        waiting = near.enter_context(socket.create_connection(("127.0.0.1", host.port), timeout=DEADLINE_S))
        while waiting.recv(4) != b"SSH-":
            waiting = near.enter_context(socket.create_connection(("127.0.0.1", host.port), timeout=DEADLINE_S))
        assert "raise MaxStartups" in refused("host", "check", "hv1")[1]
    host.stop()
    host.start()


def test_a_lost_connection_loses_no_change(coldrise, host, backup, tmp_path):
    running = Domain(host.libvirt, "web01")
    running.write("vda", "write -P 1 0 4M")
    first = backup()
    running.write("vda", "write -P 2 8M 16M")
    command = ["backup", "web01", "--from", "libvirt", "--on", "hv1", "--rate", "1M"]
    with coldrise.start(*command, stderr=subprocess.PIPE) as process:
        wait_until(running.has_job, "the backup's job")
        host.stop()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "the connection to host hv1 is lost" in said, said
    assert not any(word in said for word in ("domjobabort", "scratch files", "is lost: the connection")), said
    running.goes_on()
    host.start()
    running.write("vdb", "write -P 3 1M 64k")
    made = backup()
    assert [disk["base"] for disk in made["disks"]] == [first["point"]] * 2
    assert "ended the backup job that a killed backup left in libvirt" in made["instant"]["remarks"]
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    assert len(running.checkpoints()) == 1 and not running.has_job()


def test_disks_with_an_iothread_are_copied_on_the_host(coldrise, host, backup, tmp_path):
    running = Domain(host.libvirt, "web01", iothread=True)
    running.write("vda", "write -P 17 0 4M")
    full = backup()
    assert "iothread" in full["instant"]["remarks"][0]
    assert_same_as_now(coldrise, full["address"], running, tmp_path)
    running.write("vda", "write -P 18 8M 1M")
    part = backup()
    assert [disk["read_bytes"] for disk in part["disks"]] == [MIB, 0]
    assert_same_as_now(coldrise, part["address"], running, tmp_path)


@pytest.fixture
def off(host):
    """A domain that is off and has 20 MiB of content."""
    made = Domain(host.libvirt, "web01", persistent=True)
    made.write("vda", "write -P 17 0 20M")
    made.end()
    return made


def test_a_machine_that_is_off_is_read_on_its_host(coldrise, host, backup, off, tmp_path):
    full = backup()
    assert full["instant"]["is_off"] and full["instant"]["remarks"] == []
    assert_same(coldrise, full, off, tmp_path)
    write(off, "vda", "write -P 18 8M 64k")
    part = backup()
    assert [disk["read_bytes"] for disk in part["disks"]] == [65536, 0]
    assert_same(coldrise, part, off, tmp_path)
    same = backup()
    assert same["is_unchanged"] and [disk["base"] for disk in same["disks"]] == [part["point"]] * 2
    assert [name.endswith(same["point"]) for name in bitmaps(off)] == [True]


def test_a_start_on_the_host_is_not_hindered(coldrise, host, backup, off, tmp_path):
    first = backup()
    write(off, "vda", "write -P 19 0 20M")
    reading = RunningBackup(coldrise, "web01", "--from", "libvirt", "--on", "hv1", "--rate", "8M")
    # Else it could have read all before the start.
    reading.process.send_signal(signal.SIGSTOP)
    host.libvirt.virsh("start", "web01", "--paused")
    off.write("vda", "write -P 20 0 4M")
    code, made, messages = reading.end(signal.SIGCONT)
    assert code == 0 and "starts again" in messages, messages
    assert not made["instant"]["is_off"] and made["disks"][0]["base"] == first["point"]
    assert_same_as_now(coldrise, made["address"], off, tmp_path)
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 2
    assert [name.endswith(made["point"]) for name in off.checkpoints()] == [True]


def test_a_connection_that_is_lost_while_a_machine_is_off(coldrise, host, backup, off, tmp_path):
    first = backup()
    write(off, "vda", "write -P 19 0 20M")
    reading = RunningBackup(coldrise, "web01", "--from", "libvirt", "--on", "hv1", "--rate", "1M")
    host.stop()
    code, _, messages = reading.end()
    assert code not in (0, 101) and messages, messages
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 1
    assert len(bitmaps(off)) == 2 and list(host.scratch.iterdir())
    # qemu-nbd ends with the program that started it.
    readers = ["pgrep", "-f", f"qemu-nbd .*{off.images['vda']}"]
    wait_until(lambda: subprocess.run(readers, capture_output=True, check=False).returncode == 1, "the end of qemu-nbd")
    host.start()
    made = backup()
    assert [disk["base"] for disk in made["disks"]] == [first["point"]] * 2
    assert [name.endswith(made["point"]) for name in bitmaps(off)] == [True]
    assert_same(coldrise, made, off, tmp_path)


def test_the_service_adds_and_checks_hosts(hv1, coldrise, request):
    service = request.getfixturevalue("service")
    added = service.post("kvm-hosts/hv1", {"address": hv1.address}, expected=(201,))
    assert not added["last_check"]["is_ok"] and "does not accept this repository's key" in added["last_check"]["error"]
    line = service.get("kvm-hosts")["authorized_keys"]
    assert line == coldrise.json("host", "key")["authorized_keys"]
    hv1.keys.write_text(line + "\n", encoding="utf-8")
    Domain(hv1.libvirt, "web01")
    Domain(hv1.libvirt, "db01")
    service.post("jobs", {"name": "n", "kind": "backup", "from": "libvirt", "hosts": ["hv1"], "machines": ["web*"]})
    checked = service.post("kvm-hosts/hv1/check", {})
    assert checked["last_check"]["is_ok"] and checked["contact"]["unprotected"] == ["db01"]
    assert service.get("kvm-hosts")["hosts"] == [checked]
    job = {"name": "o", "kind": "backup", "from": "libvirt", "machines": ["*"]}
    for hosts, words in (([], "the list is empty"), (["hv1", "hv9"], "there is no host hv9; there are: hv1")):
        refused = service.call("POST", "jobs", {**job, "hosts": hosts})
        assert refused.status == 400 and words in refused.json["detail"], refused.body
    kept = service.call("DELETE", "kvm-hosts/hv1")
    assert kept.status == 409 and "jobs: n" in kept.json["detail"], kept.body
    assert service.call("DELETE", "jobs/n").status == 204
    for name, body, status in (("hv1", {"address": hv1.address}, 409), ("x", {"address": "hv1"}, 400), ("X!", {"address": hv1.address}, 400)):
        assert service.call("POST", f"kvm-hosts/{name}", body).status == status, name
    viewer = service.token("viewer")
    assert service.call("GET", "kvm-hosts", token=viewer).status == 403
    assert service.call("DELETE", "kvm-hosts/hv1", token=viewer).status == 403
    assert service.call("DELETE", "kvm-hosts/hv1").status == 204
    assert service.get("kvm-hosts")["hosts"] == []


@pytest.fixture
def hv2(coldrise):
    started = SshHost()
    started.add_to(coldrise, "hv2")
    yield started
    started.close()


def test_a_machine_is_backed_up_where_it_runs(coldrise, host, hv2, refused, request, tmp_path):
    one, two = Domain(host.libvirt, "web01"), Domain(hv2.libvirt, "db01")
    everywhere = ("--from", "libvirt", "--on", "hv1,hv2")
    two.write("vda", "write -P 5 0 1M")
    made = coldrise.json("backup", "db01", *everywhere)
    assert_same_as_now(coldrise, made["address"], two, tmp_path)
    assert "no domain web09 is on hv1, hv2" in refused("backup", "web09", *everywhere)[1]
    # A pattern means machines that are off, too.
    Domain(hv2.libvirt, "idle01", persistent=True).end()
    service = request.getfixturevalue("service")
    service.post("jobs", {"name": "nightly", "kind": "backup", "from": "libvirt", "hosts": ["hv1", "hv2"], "machines": ["*"],
                          "retries": 0})

    def runs():
        """The results of the job's runs, and the number of points of each machine."""
        started = service.post("jobs/nightly/start", {}, expected=(202,))["runs"]
        wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
        states = sorted(service.get(f"runs/{run}")["state"] for run in started)
        return states, {one["machine"]: len(one["points"]) for one in coldrise.json("list")["machines"]}

    assert runs() == (["ok", "ok", "ok"], {"db01": 2, "idle01": 1, "web01": 1})
    one.write("vda", "write -P 6 0 1M")
    other = Domain(hv2.libvirt, "web01")
    assert "a domain web01 runs on hv1 and on hv2" in refused("backup", "web01", *everywhere)[1]
    other.end()
    off = Domain(host.libvirt, "idle02", persistent=True)
    off.end()
    coldrise.run("host", "check")
    hv2.stop()
    # It cannot be on hv2; the other one may run there.
    made = coldrise.run("backup", "idle02", *everywhere)
    assert made.returncode == 0 and "idle02 was not on this host at its last contact" in made.stderr, made.stderr
    assert "name the other hosts only" in refused("backup", "idle01", *everywhere)[1]
    host.libvirt.virsh("undefine", "idle02")
    assert runs() == (["failed", "ok"], {"db01": 2, "idle01": 1, "idle02": 1, "web01": 2})
    failed = next(run for run in service.get("runs")["runs"] if run["state"] == "failed")
    assert "host hv2" in str(service.get(f"runs/{failed['id']}")), failed
    assert not next(one for one in service.get("kvm-hosts")["hosts"] if one["name"] == "hv2")["last_check"]["is_ok"]
    assert "looking for domain web09" in refused("backup", "web09", *everywhere)[1]
    hv2.start()


def test_a_host_where_the_program_cannot_run(host, refused):
    host.cache.parent.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "noexec", "none", host.cache.parent]
    subprocess.run([*host.libvirt.inside(), *mount], check=True)
    code, said = refused("host", "check", "hv1")
    assert "cannot run" in said and "noexec" in said and code == 1
    subprocess.run([*host.libvirt.inside(), "umount", host.cache.parent], check=True)
    subprocess.run([*host.libvirt.inside(), *mount[:4], "size=64k", *mount[5:]], check=True)
    assert "cannot write to" in refused("host", "check", "hv1")[1]
    subprocess.run([*host.libvirt.inside(), "umount", host.cache.parent], check=True)
    host.cache.chmod(0o777)
    assert "cannot trust" in refused("host", "check", "hv1")[1]
    host.cache.chmod(0o700)
    host.stop()
    assert refused("host", "check", "hv1")[0] == 1
    host.start()
