"""Recovery into production through the service: libvirt, move, rollback, attached disks."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.cli import PROGRAM
from support.counting_machine import MIB, count
from support.image import Image
from support.machine import machine
from support.nbdserver import wait_until
from support.running import TICKING_SECTOR
from support.service import Coldrised


@pytest.fixture
def service(coldrise, tmp_path, entered_tmp, libvirt, address, clock):
    """A service with libvirtd, with sockets where QEMU's user finds them. Its runs have the clock."""
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, prefix=libvirt.inside(),
                   options=["--program", clock.program(PROGRAM, tmp_path)], environment={"RUNTIME_DIRECTORY": str(entered_tmp)}) as service:
        service.address = address
        wait_until(lambda: service.call("GET", "machines/web01").status == 200, "the repository")
        yield service
        libvirt.clear()
        wait_until(lambda: not service.get("runs?state=running")["runs"], "the servers end")


def ended(service, run, clock=None):
    """The record of a run, once it has ended; with a clock, without what it waits for."""
    def has_ended():
        if clock:
            clock.skip(1)
        answer = service.call("GET", f"runs/{run}")
        return answer.status == 200 and answer.json["state"] != "running"

    wait_until(has_ended, f"run {run}")
    return service.get(f"runs/{run}")


def start(service, **body):
    return service.post("runs", body)["run"]


def recovered(service, session="web01-1"):
    answer = service.call("GET", f"sessions/{session}")
    return (answer.json.get("recovered") or {}) if answer.status == 200 else {}


def recover(service, **more):
    """Recovers the machine; returns the run, once the machine runs."""
    run = start(service, kind="recover", to="libvirt", **{"address": service.address, **more})
    wait_until(lambda: recovered(service).get("state") == "running" or ended_badly(service, run), "the machine")
    return run


def ended_badly(service, run):
    answer = service.call("GET", f"runs/{run}")
    assert answer.status == 404 or answer.json["state"] == "running", answer.json
    return False


def refused(service, body, status, words, **keywords):
    answer = service.call("POST", "runs", body, **keywords)
    assert (answer.status, words in answer.json["detail"]) == (status, True), (body, answer.status, answer.body)


def test_a_machine_runs_under_libvirt_survives_its_server_and_is_undone(service, libvirt, coldrise, tmp_path):
    run = recover(service)
    found = recovered(service)
    assert (found["name"], found["connect"], found["run"]) == ("web01", "qemu:///system", run)
    assert libvirt.state("web01").startswith("running")
    record = service.get(f"runs/{run}")
    assert record["plan"]["machine"] == "web01" and record["progress"]["session"] == "web01-1"
    again = {"kind": "recover", "address": "live/web01-1", "to": "libvirt"}
    refused(service, again, 409, "in use")
    # The server of its disks is killed: the page can report it, and start it again.
    os.kill(record["plan"]["who"]["pid"], 9)
    wait_until(lambda: recovered(service)["run"] is None, "the end of the server")
    wait_until(lambda: not service.get("sessions/web01-1")["is_served"], "the end of the server of its disks")
    wait_until(lambda: libvirt.state("web01") == "paused (I/O error)", "the pause")
    assert recover(service, address="live/web01-1") != run
    assert libvirt.state("web01").startswith("running")
    before = count(coldrise, "live/web01-1", tmp_path)
    # Cancelled, it suspends the machine first.
    service.call("POST", f"runs/{recovered(service)['run']}/cancel", {})
    wait_until(lambda: libvirt.state("web01") == "paused (user)", "the pause")
    undone = ended(service, start(service, kind="recover", address="live/web01-1", undo=True))
    sealed = undone["result"]["counts"]["address"]
    assert sealed.startswith("web01/") and count(coldrise, sealed, tmp_path) >= before
    assert libvirt.domains() == [] and service.call("GET", "sessions/web01-1").status == 404


def test_recover_requires_permission(service):
    body = {"kind": "recover", "address": service.address, "to": "libvirt"}
    own = {**body, "connect": "qemu:///system?socket=/nonexistent/libvirt-sock"}
    viewer, operator = service.token("viewer"), service.token("operator")
    limited = service.token("operator", ["web*"])
    refused(service, body, 403, "viewer", token=viewer, over="tls")
    # A URI that names a socket of the host.
    refused(service, own, 403, "operator", token=operator, over="tls")
    refused(service, {**body, "name": "db01"}, 404, "no machine db01", token=limited, over="tls")
    # Missing requirements are reported before the start.
    refused(service, own, 422, "/nonexistent/libvirt-sock is missing")
    assert service.get("host")["libvirt_missing"] is None
    refused(service, {"kind": "recover", "address": service.address}, 400, "to: name the hypervisor")
    refused(service, {"kind": "recover", "address": service.address, "to": "vcenter:vc1", "on": "hv1"}, 400, "on: only for libvirt")
    refused(service, {**body, "on": "hv1", "connect": "qemu:///session"}, 400, "qemu:///system")
    refused(service, {**own, "network": "a\nb"}, 400, "control characters")
    refused(service, {"kind": "recover", "address": service.address, "undo": True}, 400, "give live/SESSION")
    assert service.get("runs")["runs"] == []


def test_a_machine_moves_while_it_runs(service, libvirt, coldrise, tmp_path):
    run = recover(service)
    folder = libvirt.images
    body = {"kind": "move", "address": "live/web01-1", "targets": [f"vda={folder}/web01.qcow2"]}
    # Only administrators of all machines write to paths of the host; never to the service's own.
    for role, machines in (("viewer", ["*"]), ("operator", ["*"]), ("admin", ["web*"])):
        answer = service.call("POST", "runs", body, token=service.token(role, machines), over="tls")
        assert answer.status == 403, (role, answer.body)
    (folder / "there.qcow2").write_bytes(b"precious")
    for targets, status, words in (
        ([f"vda={folder}/there.qcow2"], 409, "exists already"), ([f"vda={folder}/none/a.qcow2"], 404, "does not exist"),
        ([f"vda=raw:{service.state}/a.img"], 400, "of the service itself"), ([str(coldrise.repository)], 400, "itself"),
        (["vda=a.qcow2"], 400, "absolute path"), ([f"vdb={folder}/b.qcow2"], 404, "vdb"), ([str(folder / "none")], 400, "folder"),
    ):
        refused(service, {**body, "targets": targets}, status, words)
    # A copy with progress is cancelled: the machine stays where it is.
    slow = start(service, **body, rate_bytes_per_second=1 << 20)
    wait_until(lambda: moving(service, slow).get("done_bytes", 0) > 0, "progress")
    assert moving(service, slow)["phase"] == "moving" and moving(service, slow)["total_bytes"] > 0
    wait_until(lambda: (service.get("sessions/web01-1")["moved"] or {}).get("is_running"), "the note")
    service.call("POST", f"runs/{slow}/cancel", {})
    assert ended(service, slow)["state"] == "cancelled" and not (folder / "web01.qcow2").exists()
    assert service.get("sessions/web01-1")["moved"] is None
    assert service.get("sessions/web01-1")["is_served"]
    # The same request twice starts one move.
    key = {"Idempotency-Key": "once"}
    moves = {service.post("runs", body, headers=key)["run"] for _ in range(2)}
    done = ended(service, moves.pop())
    assert done["state"] == "ok" and not moves, done
    counts = done["result"]["counts"]
    assert counts["copied_bytes"] >= 8 * MIB and counts["disks"][0]["is_moved"]
    moved = service.get("sessions/web01-1")["moved"]
    assert (moved["phase"], moved["point"]) == ("settled", counts["address"])
    assert moved["usable_since_ms"] < moved["settled_at_ms"] and str(folder / "web01.qcow2") in moved["sentence"]
    assert str(folder / "web01.qcow2") in libvirt.virsh("domblklist", "web01")
    assert ended(service, run)["result"]["counts"]["state"] == "moved"
    # The side that no longer counts does not start.
    late = ended(service, start(service, kind="recover", address="live/web01-1", to="libvirt"))
    assert late["result"]["exit_code"] == 11 and "was moved" in late["result"]["error"]["message"]
    noted = [entry for entry in service.get("audit") if '"move"' in entry["subject"]]
    assert {entry["result"] for entry in noted} >= {"ok", "403"}, noted


def test_a_machine_that_was_booted_here_moves(service, coldrise, tmp_path):
    boot = start(service, kind="boot", address=service.address, session="here", memory_mib=32)
    wait_until(lambda: service.call("GET", "sessions/here").status == 200
               and (service.get("sessions/here")["running"] or {}).get("state") == "running", "the machine")
    before = count(coldrise, "live/here", tmp_path)
    folder = tmp_path / "moved"
    folder.mkdir()
    done = ended(service, start(service, kind="move", address="live/here", targets=[str(folder)]))
    assert done["state"] == "ok", done
    assert count(coldrise, done["result"]["counts"]["address"], tmp_path) >= before
    found = service.get("sessions/here")
    assert found["moved"]["phase"] == "settled" and found["running"]["state"] == "running"
    assert found["moved"]["disks"][0]["target"] == str(folder / "web01-vda.qcow2")
    service.call("POST", f"runs/{boot}/cancel", {})
    ended(service, boot)


def moving(service, run):
    answer = service.call("GET", f"runs/{run}")
    return (answer.json.get("progress") or {}) if answer.status == 200 else {}


@pytest.fixture
def disk(coldrise, tmp_path):
    """A disk that was stored and then changed: 8 KiB differ. Named before the service, which sees it at
    once. Returns its path, its point and the stored bytes."""
    image = Image(4 * MIB)
    image.fill(0, MIB, "stored")
    path = image.save(tmp_path / "data.raw")
    stored = path.read_bytes()
    address = coldrise.backup("db01", vda=path)
    with open(path, "r+b") as file:
        file.seek(2 * MIB)
        file.write(b"\xa5" * 8192)
    return path, address, stored


def test_a_disk_is_rolled_back_after_a_dry_run(disk, service):
    path, address, stored = disk
    body = {"kind": "rollback", "address": address, "disks": {"vda": str(path)}}
    changed = path.read_bytes()
    for role, machines in (("operator", ["*"]), ("admin", ["db*"])):
        answer = service.call("POST", "runs", {**body, "dry_run": True}, token=service.token(role, machines), over="tls")
        assert answer.status == 403, (role, answer.body)
    own = {**body, "disks": {"vda": str(service.state / "coldrised.db")}}
    refused(service, own, 400, "of the service itself")
    refused(service, {**body, "onto": str(path)}, 400, "in one of them")
    refused(service, {**body, "disks": {"vda": "data.raw"}}, 400, "absolute path")
    tried = ended(service, start(service, **body, dry_run=True))["result"]["counts"]
    assert (tried["differing_bytes"], tried["disks"][0]["range_count"]) == (8192, 1)
    assert path.read_bytes() == changed
    done = ended(service, start(service, **body))["result"]["counts"]
    assert path.read_bytes() == stored and done["differing_bytes"] == 8192
    back = ended(service, start(service, kind="rollback", address=done["safety_point"], onto=str(path)))
    assert back["state"] == "ok" and path.read_bytes() == changed


def test_a_disk_is_attached_listed_and_detached(disk, service, own_tmp, clock):
    _, address, _ = disk
    with machine(own_tmp) as host:
        body = {"kind": "attach", "address": f"{address}/vda", "to": host.qmp, "name": "look", "device": "scsi"}
        answer = service.call("POST", "runs", body, token=service.token("admin", ["db*"]), over="tls")
        assert answer.status == 403, answer.body
        refused(service, {**body, "to": f"qmp:{service.runs}/x/machine/qmp"}, 400, "of the service itself")
        refused(service, {**body, "name": "a b"}, 400, "name of an attached disk")
        run = start(service, **body)
        wait_until(lambda: moving(service, run).get("name") == "look", "the disk")
        assert wait_until(lambda: host.node("coldrise-look"), "the disk in QEMU")["ro"]
        [listed] = service.get("runs?state=running&machine=db01")["runs"]
        assert (listed["id"], listed["progress"]["address"]) == (run, f"{address}/vda")
        detached = ended(service, start(service, kind="detach", name="look", **{"from": host.qmp}))
        assert detached["state"] == "ok" and host.node("coldrise-look") is None
        assert ended(service, run, clock)["state"] == "ok"


def test_a_disk_is_attached_to_a_domain(disk, service, libvirt, domain, clock):
    _, address, _ = disk
    domain(sector=TICKING_SECTOR)
    body = {"kind": "attach", "address": f"{address}/vda", "to": "libvirt:web01"}
    for wrong in ("web01", "libvirt:", "libvirt:-x", "host"):
        refused(service, {**body, "to": wrong}, 400, "libvirt:DOMAIN")
    run = start(service, **body)
    wait_until(lambda: moving(service, run).get("name") == "db01-vda" or ended_badly(service, run), "the disk")
    wait_until(lambda: "vdz" in libvirt.virsh("domblklist", "web01"), "the domain's disk")
    detached = ended(service, start(service, kind="detach", name="db01-vda", **{"from": "libvirt:web01"}))
    assert detached["state"] == "ok" and "vdz" not in libvirt.virsh("domblklist", "web01"), detached
    assert ended(service, run, clock)["state"] == "ok"


@pytest.mark.encrypted
def test_an_alias_of_an_own_file_is_not_a_target(disk, service, tmp_path):
    _, address, _ = disk
    for number, own in enumerate((service.state / "coldrised.db", Path(service.passphrase_file))):
        link = tmp_path / f"link{number}"
        os.link(own, link)
        before = own.read_bytes()
        refused(service, {"kind": "rollback", "address": address, "onto": str(link)}, 400, "of the service itself")
        assert own.read_bytes() == before


def test_recovery_works_from_another_host(disk, service, libvirt, tmp_path):
    token = tmp_path / "token"
    token.write_text(service.token("admin"))

    def remote(*words):
        line = [PROGRAM, "--json", "--server", f"https://localhost:{service.port}", "--token-file", token,
                "--server-certificate", service.state / "tls" / "cert.pem", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COLDRISE_")}
        done = subprocess.run([str(word) for word in line], env={**kept, "COLDRISE_RUNS": "none"},
                              capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    # It returns when the machine runs: the service serves the disks.
    answer = remote("recover", service.address, "--to", "libvirt")
    assert (answer["domain"], answer["session"], answer["state"]) == ("web01", "web01-1", "running")
    folder = libvirt.images
    run = recovered(service)["run"]
    moved = remote("move", "live/web01-1", folder)
    assert ended(service, run)["result"]["counts"]["state"] == "moved"
    assert moved["disks"][0]["target"] == str(folder / "web01-vda.qcow2")
    path, address, _ = disk
    assert remote("rollback", address, f"vda={path}", "--dry-run")["differing_bytes"] == 8192
