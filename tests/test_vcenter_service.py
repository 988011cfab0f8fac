"""Recovery under vCenter through the service: servers that administrators configure, runs, and who may what."""

import contextlib
import json
import os
import stat
import subprocess

import pytest

from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.service import Coldrised
from support.vcenter import PASSWORD, USER, Vcenter

HOST, OTHER = "DC0_C0_H0", "DC0_C0_H1"
SESSION, NAME = "web01-1", "web01-recovered"


@pytest.fixture
def vcenter(network, tmp_path):
    vcenter = Vcenter(network, tmp_path / "vcenter")
    vmx = tmp_path / "empty.vmx"
    vmx.touch()
    vcenter.make_datastore_folder(SESSION, NAME, vmx)
    yield vcenter
    vcenter.close()


@pytest.fixture
def service(coldrise, point, network, vcenter, tmp_path):
    """A service in the network of the vCenter."""
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, prefix=network.command()) as service:
        service.address = point
        wait_until(lambda: service.call("GET", "machines/web01").status == 200, "the repository")
        yield service
        for run in service.get("runs?state=running")["runs"]:
            service.call("POST", f"runs/{run['id']}/cancel", {})
        wait_until(lambda: not service.get("runs?state=running")["runs"], "the servers end")


def settings(vcenter, **more):
    return {"kind": "vcenter", "address": vcenter.server, "user": USER, "password": PASSWORD,
            "thumbprint": vcenter.thumbprint(), "nfs_server": "127.0.0.1", **more}


def put(service, name, body, expected=200, **keywords):
    answer = service.call("PUT", f"hypervisors/{name}", body, **keywords)
    assert answer.status == expected, (answer.status, answer.body)
    return answer.json


def ended(service, run, state="ok"):
    def has_ended():
        answer = service.call("GET", f"runs/{run}")
        return answer.status == 200 and answer.json["state"] != "running"

    wait_until(has_ended, f"run {run}")
    record = service.get(f"runs/{run}")
    assert record["state"] == state, record
    return record


def start(service, **body):
    keywords = {name: body.pop(name) for name in ("token", "over") if name in body}
    return service.post("runs", body, **keywords)["run"]


def refused(service, body, status, words, **keywords):
    answer = service.call("POST", "runs", body, **keywords)
    assert (answer.status, words in answer.json["detail"]) == (status, True), (body, answer.status, answer.body)


def serves(service, run):
    """Whether the run serves the session's machine. A run that ended meanwhile fails the test with its reason."""
    found = service.call("GET", f"runs/{run}")
    # A run that waits has no record yet.
    assert found.status == 404 or found.json["state"] == "running", found.body
    return machine(service).get("run") == run


def machine(service):
    answer = service.call("GET", f"sessions/{SESSION}")
    return (answer.json["vsphere"] or {}) if answer.status == 200 else {}


def secrets(service):
    return sorted((service.state / "hypervisors").glob("*"))


def test_a_machine_is_recovered_moved_and_undone_by_an_operator(service, vcenter, tmp_path):
    put(service, "vc01", settings(vcenter))
    operator = {"token": service.token("operator", ["web*"]), "over": "unix"}
    body = {"kind": "recover", "address": service.address, "to": "vcenter:vc01", "hosts": [HOST, OTHER]}
    run = start(service, **body, **operator)
    wait_until(lambda: serves(service, run), "the run that serves")
    found = machine(service)
    assert (found["phase"], found["name"], found["hypervisor"]) == ("running", NAME, "vc01")
    seen = vcenter.look()
    assert seen["machines"][NAME]["state"] == "poweredOn" and seen["machines"][NAME]["host"] == HOST
    assert list(seen["nas"].values())[0]["hosts"] == [HOST, OTHER]
    # Its server is killed; it is started again as it was configured.
    os.kill(service.get(f"runs/{run}")["plan"]["who"]["pid"], 9)
    wait_until(lambda: machine(service)["run"] is None, "the end of the server")
    again = start(service, kind="recover", address=f"live/{SESSION}", to="vcenter:vc01", **operator)
    wait_until(lambda: serves(service, again), "the run that serves")
    # A server that a session needs stays, and its address.
    assert service.call("DELETE", "hypervisors/vc01").status == 409
    assert "needs vc01" in put(service, "vc01", settings(vcenter, address="127.0.0.1:1"), 409)["detail"]
    # Over the network, as on this host.
    refused(service, {"kind": "move", "address": f"live/{SESSION}", "targets": [f"vda={tmp_path}/x"]}, 400, "datastore")
    failed = ended(service, start(service, kind="move", address=f"live/{SESSION}", to="nowhere", **operator), "failed")
    assert "it has: LocalDS_0" in failed["result"]["error"]["message"]
    moved = ended(service, start(service, kind="move", address=f"live/{SESSION}", to="LocalDS_0", **operator))
    assert moved["result"]["counts"]["datastore"] == "LocalDS_0"
    assert (machine(service)["phase"], machine(service)["target"]) == ("moved", "LocalDS_0")
    assert ended(service, again)["result"]["counts"]["state"] == "moved"
    ended(service, start(service, kind="unpublish", session=SESSION, **operator))
    assert service.call("DELETE", "hypervisors/vc01").status == 204
    assert secrets(service) == [] and vcenter.look()["nas"] == {}
    no_password_anywhere(service)


def no_password_anywhere(service):
    """Neither in the database nor in a record of a run, nor in the log."""
    def has_it(path):
        # The running service removes files of its database.
        with contextlib.suppress(FileNotFoundError):
            return PASSWORD.encode() in path.read_bytes()
        return False

    stored = [path for path in service.state.rglob("*") if path.is_file()] + [service.log_path]
    assert [path for path in stored if has_it(path)] == []


def test_commands_name_servers_over_the_network(service, vcenter, nfs, tmp_path, network):
    nfs("--versions", "3", "--idle", "1")
    put(service, "vc01", settings(vcenter))
    token = tmp_path / "token"
    token.write_text(service.token("admin"))

    def remote(*words):
        command = network.command(PROGRAM, "--json", "--server", f"https://127.0.0.1:{service.port}", "--token-file",
                                  token, "--server-certificate", service.state / "tls" / "cert.pem", *words)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COLDRISE_")}
        return subprocess.run(command, env={**kept, "COLDRISE_RUNS": "none"}, capture_output=True, text=True,
                              timeout=120, check=False)

    done = remote("recover", service.address, "--to", "vcenter:vc01", "--host", HOST)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["state"], answer["machine"]) == ("running", NAME)
    assert vcenter.look()["machines"][NAME]["state"] == "poweredOn"
    # The password has changed meanwhile: undoing takes the present one.
    path, = secrets(service)
    path.write_text("old")
    done = remote("recover", f"live/{SESSION}", "--undo", "--discard")
    assert done.returncode != 0 and "password is wrong" in done.stdout, done.stdout
    put(service, "vc01", settings(vcenter))
    assert remote("recover", f"live/{SESSION}", "--undo", "--discard").returncode == 0
    assert vcenter.look()["nas"] == {}
    other = remote("recover", service.address, "--to", "esxi:vc01", "--host", HOST)
    assert "vcenter:vc01" in other.stdout, other.stdout


def test_passwords_are_bound_to_their_server(service, vcenter):
    added = put(service, "vc01", settings(vcenter))
    assert added["has_password"] and "password" not in added and PASSWORD not in json.dumps(service.get("hypervisors"))
    path, = secrets(service)
    assert path.read_text() == PASSWORD and stat.S_IMODE(path.stat().st_mode) == 0o600
    # Absent, it stays; for another address or user it must be given.
    kept = settings(vcenter)
    del kept["password"]
    put(service, "vc01", {**kept, "allow": ["127.0.0.0/8"]})
    assert path.read_text() == PASSWORD
    for change in ({"address": "127.0.0.1:1"}, {"user": "other"}):
        assert "password: give it" in put(service, "vc01", {**kept, **change}, 400)["detail"]
    put(service, "vc01", {**settings(vcenter), "address": "127.0.0.1:1", "password": "other"})
    assert not path.exists() and [found.read_text() for found in secrets(service)] == ["other"]
    # Lost, such as by a kill in between: this is reported, and nothing is started.
    secrets(service)[0].unlink()
    tested = service.post("hypervisors/vc01/test", {})
    assert not tested["last_test"]["is_ok"] and "password" in tested["last_test"]["text"]
    # In a file of the host's administrator.
    (service.state / "secrets").mkdir(mode=0o700)
    (service.state / "secrets" / "vcenter").write_text(PASSWORD + "\n")
    put(service, "vc01", {**kept, "password_file": "vcenter"})
    tested = service.post("hypervisors/vc01/test", {})
    assert tested["last_test"]["is_ok"], tested
    assert secrets(service) == []
    assert [host["name"] for host in tested["found"]["hosts"]][:2] == [HOST, OTHER]
    assert {"name": "LocalDS_0"}.items() <= tested["found"]["datastores"][0].items()
    audited = json.dumps(service.get("audit"))
    assert "PUT /api/v1/hypervisors/vc01" in audited
    (service.state / "secrets" / "vcenter").unlink()
    os.mkfifo(service.state / "secrets" / "vcenter")
    assert "not a regular file" in service.post("hypervisors/vc01/test", {})["last_test"]["text"]
    (service.state / "secrets" / "vcenter").unlink()
    no_password_anywhere(service)


def test_wrong_settings_are_reported(service, vcenter):
    good = settings(vcenter)
    for change, said in [
        ({"address": "vc01/sdk"}, "HOST"), ({"address": "[::1"}, "HOST"), ({"address": "vc01:99999"}, "HOST"),
        ({"address": "[x]:1"}, "HOST"), ({"address": "a:1:2"}, "HOST"), ({"address": "vc01:"}, "HOST"),
        ({"user": ""}, "user"), ({"password": "a\nb"}, "control characters"),
        ({"password_file": "x"}, "not both"), ({"certificate_file": "/etc/x"}, "not both"), ({"allow": ["x"]}, "not a network"),
        ({"thumbprint": good["thumbprint"][:59]}, "SHA-1"), ({"thumbprint": None, "certificate_file": "x"}, "absolute"),
        ({"thumbprint": None, "certificate_file": str(service.state / "coldrised.db")}, "service itself"),
        ({"thumbprint": None, "certificate_file": "/dev/zero"}, "not a regular file"),
        ({"thumbprint": None, "certificate_file": "/etc/passwd"}, "not a certificate"),
        ({"thumbprint": None, "certificate_file": "/no/such"}, "No such file"),
        ({"kind": "hyperv"}, "kind"),
    ]:
        answer = service.call("PUT", "hypervisors/vc01", {**good, **change})
        assert answer.status in (400, 422) and said in answer.json["detail"], (change, answer.body)
    assert service.call("PUT", "hypervisors/VC", good).status == 400
    # The presented thumbprint is named, so that it can be compared.
    wrong = "00:" * 31 + "00"
    put(service, "vc01", {**good, "thumbprint": wrong})
    tested = service.post("hypervisors/vc01/test", {})["last_test"]
    assert not tested["is_ok"] and vcenter.thumbprint() in tested["text"]
    put(service, "vc01", {**good, "kind": "esxi"})
    assert "is a vCenter" in service.post("hypervisors/vc01/test", {})["last_test"]["text"]
    put(service, "vc01", good)
    viewer, operator = service.token("viewer"), service.token("operator", ["db*"])
    body = {"kind": "recover", "address": service.address, "to": "vcenter:vc01", "hosts": [HOST]}
    refused(service, body, 403, "viewer", token=viewer)
    refused(service, body, 404, "web01", token=operator)
    refused(service, {**body, "to": "vcenter:vc02"}, 404, "no hypervisor vc02")
    refused(service, {**body, "to": "vcenter:"}, 404, "no hypervisor")
    refused(service, {**body, "to": "hyperv"}, 400, "name the hypervisor")
    refused(service, {**body, "network": "VM Network"}, 400, "vSphere client")
    refused(service, {**body, "without_server": True}, 400, "undo")
    refused(service, {**body, "to": "libvirt"}, 400, "hosts")
    refused(service, {"kind": "recover", "address": f"live/{SESSION}", "to": "vcenter:vc01"}, 404, "no session")
    assert service.call("GET", "hypervisors", token=viewer).status == 403
    for method, path, sent in [("PUT", "hypervisors/vc02", good), ("DELETE", "hypervisors/vc01", None),
                               ("POST", "hypervisors/vc01/test", {})]:
        assert service.call(method, path, sent, token=service.token("operator")).status == 403, path
    assert service.get("runs")["runs"] == []
