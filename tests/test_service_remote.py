"""`coldrise --server`: commands on the service of another host."""

import json
import os
import signal
import subprocess
import time

import pytest

from support.cli import PROGRAM
from support.image import Image
from support.service import Coldrised

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    image = Image(4 * MIB)
    image.fill(0, 2 * MIB, "random")
    return image.save(tmp_path / "disk.raw")


@pytest.fixture
def service(tmp_path, coldrise, disk):
    coldrise.backup("web01", vda=disk)
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file) as service:
        yield service


@pytest.fixture
def remote(service, tmp_path):
    """Runs a command with a token of this role; returns the finished process."""

    def command(role, *arguments):
        token = tmp_path / f"{role}.token"
        token.write_text(service.token(role) + "\n")
        words = [PROGRAM, "--server", f"https://localhost:{service.port}", "--token-file", token,
                 "--server-certificate", service.state / "tls" / "cert.pem", *arguments]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COLDRISE_")}
        return [str(word) for word in words], {**kept, "COLDRISE_RUNS": "none"}

    def run(role, *arguments):
        words, environment = command(role, *arguments)
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)

    run.command = command
    return run


def last_object(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_lists_match_those_on_the_host(remote, coldrise):
    coldrise.publish("web01/latest", "trial")
    for arguments in (["list"], ["list", "web01"], ["show", "web01/latest"], ["show", "live/trial"], ["sessions"]):
        there, here = remote("viewer", *arguments), coldrise.run(*arguments)
        assert (there.returncode, there.stdout) == (0, here.stdout), there.stderr
        there, here = remote("viewer", "--json", *arguments), coldrise.run("--json", *arguments)
        assert last_object(there) == last_object(here)


def test_commands_become_runs_of_the_service(remote, service, coldrise, disk):
    done = remote("admin", "--json", "backup", "web02", f"vda=raw:{disk}")
    assert done.returncode == 0, done.stderr
    assert last_object(done)["address"].startswith("web02/")
    assert remote("operator", "publish", "web02/latest", "--name", "trial").returncode == 0
    assert remote("operator", "verify", "web02/latest").returncode == 0
    assert remote("operator", "unpublish", "trial").returncode == 0
    restored = remote("operator", "restore", "web02/latest/vda", "out.raw")
    assert restored.returncode == 0, restored.stderr
    assert (service.state / "restores" / "out.raw").read_bytes()[:MIB] == disk.read_bytes()[:MIB]
    commands = {run["plan"]["command"]: run["plan"]["requested_by"] for run in service.get("runs")["runs"]}
    assert set(commands) == {"backup", "publish", "verify", "unpublish", "restore"}
    assert all(who.startswith("token:") for who in commands.values())


def test_runs_and_space_of_the_other_host(remote, service, coldrise, disk):
    there, here = last_object(remote("viewer", "--json", "stats")), last_object(coldrise.run("--json", "stats"))
    assert there.pop("elapsed_ms") >= 0 and here.pop("elapsed_ms") >= 0
    assert there == here
    assert remote("viewer", "stats").stdout.splitlines()[0] == coldrise.run("stats").stdout.splitlines()[0]

    coldrise.publish("web01/latest", "trial")
    sealed = remote("operator", "unpublish", "trial")
    assert sealed.returncode == 0, sealed.stderr
    assert remote("admin", "fold").returncode == 0
    listed = last_object(remote("viewer", "--json", "runs"))["runs"]
    assert [run["plan"]["command"] for run in listed] == ["fold", "unpublish"]
    shown = remote("viewer", "runs", "show", listed[0]["id"])
    assert shown.returncode == 0 and "coldrise" in shown.stdout and "asked by" in shown.stdout, shown.stderr
    assert listed[0]["id"] in remote("viewer", "runs").stdout

    started = service.post("runs", {"kind": "backup", "machine": "web03", "disks": {"vda": f"raw:{disk}"},
                                    "rate_bytes_per_second": 64 << 10})
    deadline = time.monotonic() + 60
    while service.get("runs")["runs"][0]["id"] != started["run"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cancelled = remote("operator", "--json", "runs", "cancel", started["run"])
    assert cancelled.returncode == 0, cancelled.stderr
    assert last_object(cancelled)["state"] == "cancelled"


def test_a_disk_named_twice_is_refused(remote, service, disk):
    for words in (["backup", "web02", f"vda=raw:{disk}", f"vda=raw:{disk}"], ["rollback", "web01/latest", "vda=/a", "vda=/b"]):
        done = remote("admin", *words)
        assert done.returncode == 2 and "disk vda is named twice" in done.stderr, done.stderr
    kind = {"Content-Type": "application/json"}
    twice = f'"disks": {{"vda": "raw:{disk}", "vda": "raw:{disk}"}}'
    for path, fields in [("runs", '"kind": "backup", "machine": "web02"'),
                         ("jobs", '"name": "x", "kind": "backup", "machines": ["web02"]')]:
        refused = service.call("POST", path, f"{{{fields}, {twice}}}".encode(), headers=kind)
        assert 400 <= refused.status < 500 and b"disk vda is named twice" in refused.body, refused.body


def test_errors_have_the_kind_and_exit_code_of_the_command(remote):
    missing = remote("admin", "--json", "verify", "nothere/latest")
    assert missing.returncode == 1 and last_object(missing)["error"]["kind"] == "not_found"
    forbidden = remote("viewer", "verify", "web01/latest")
    assert forbidden.returncode == 1 and "viewer" in forbidden.stderr
    for arguments in (["doctor"], ["serve", "nbd"], ["gc", "--dry-run"], ["show", "web01/latest/vda"], ["stats", "web01"],
                      ["runs", "show", "--follow", "20261123T014500Z-4f2a-backup"], ["fold", "web01/latest", "web01/latest~1"]):
        refused = remote("admin", *arguments)
        assert refused.returncode == 2 and "not possible over the network" in refused.stderr, arguments


def test_wrong_addresses_and_proofs_have_clear_errors(remote, service, tmp_path):
    words, environment = remote.command("viewer", "list")
    at = words.index("--server") + 1

    def answer(**changes):
        changed = [changes.get("url", word) if i == at else word for i, word in enumerate(words)]
        return subprocess.run(changed, env=environment, capture_output=True, text=True, timeout=60)

    assert answer(url=f"http://localhost:{service.port}").returncode == 2
    away = answer(url="https://localhost:1")
    assert away.returncode == 1 and "cannot be reached" in away.stderr
    # Another certificate is not trusted.
    other = [word for word in words if "cert.pem" not in word and word != "--server-certificate"]
    untrusted = subprocess.run(other, env=environment, capture_output=True, text=True, timeout=60)
    assert untrusted.returncode == 1 and "ertificate" in untrusted.stderr
    (tmp_path / "viewer.token").write_text("cr_0_0\n")
    refused = answer()
    assert refused.returncode == 1 and "token" in refused.stderr
    words.append("--json")
    assert json.loads(answer().stdout)["error"]["kind"] == "unauthorized"
    forbidden = remote("viewer", "--json", "gc")
    assert forbidden.returncode == 1 and json.loads(forbidden.stdout)["error"]["kind"] == "forbidden"


def test_ctrl_c_cancels_the_run(remote, service, disk):
    words, environment = remote.command("admin", "backup", "web03", f"vda=raw:{disk}", "--rate", "64K")
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not service.get("runs")["runs"]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)
    [run] = service.get("runs")["runs"]
    assert process.returncode == 130 and run["state"] == "cancelled", (output, run)
