"""coldrise recover --to vcenter: and esxi:, and the move of such machines: vcsim is the other side, the NFS server is
the real one, and pyvmomi says what vcsim holds."""

import json
import os
import signal
import subprocess
import sys

import pytest

from support import nfs3
from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.foreground import children
from support.stopped import stopped
from support.vcenter import PASSWORD, USER, Vcenter
from support.wallclock import BothClocks

HOST, OTHER = "DC0_C0_H0", "DC0_C0_H1"
DATASTORE, SESSION, NAME = "coldrise-127.0.0.1", "web01-1", "web01-recovered"


class Site:
    """A repository with a point of web01, a vCenter, and commands in their network."""

    def __init__(self, coldrise, vcenter, address):
        self.coldrise, self.vcenter, self.address = coldrise, vcenter, address
        self.processes = []

    def command(self, *arguments):
        return self.vcenter.network.command(PROGRAM, "--json", *arguments)

    def environment(self, **more):
        return {**self.coldrise.environment(), **more}

    def access(self, password_file):
        return ["--user", USER, "--password-file", password_file or self.vcenter.password_file, "--certificate",
                self.vcenter.certificate]  # fmt: skip

    def run(self, *arguments, **variables):
        return subprocess.run(self.command(*arguments), env=self.environment(**variables), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=120, check=False)

    def json(self, *arguments):
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def refused(self, *arguments, **variables):
        """The message of a command that must fail."""
        done = self.run(*arguments, **variables)
        assert done.returncode != 0, done.stdout
        return json.loads(done.stdout.splitlines()[-1])["error"]["message"]

    def recovery(self, *options, address=None, kind="vcenter", host=HOST, password_file=None):
        hosts = ["--host", host] if host else []
        return ["recover", address or self.address, "--to", f"{kind}:{self.vcenter.server}", *hosts,
                *self.access(password_file), *options]  # fmt: skip

    def start(self, *arguments, clock=None):
        more = clock.environment() if clock else {}
        process = subprocess.Popen(self.command(*arguments), env=self.environment(**more), stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def recover(self, *options, **keywords):
        """A recovery that serves the disks; returns its process and event."""
        process = self.start(*self.recovery(*options, **keywords))
        line = process.stdout.readline()
        assert '"running"' in line, line + process.stderr.read()
        return process, json.loads(line)

    def undo(self, *options):
        return self.json("recover", f"live/{SESSION}", "--undo", *options)

    def is_clean(self):
        seen = self.vcenter.look()
        return seen["nas"] == {} and NAME not in seen["machines"] and self.sessions() == []

    def sessions(self):
        return self.coldrise.json("sessions")["sessions"]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def says(process, words):
    """Waits for a message."""
    before = []
    for line in process.stderr:
        if words in line:
            return
        before.append(line)
    raise AssertionError(before)


def name_of(process):
    with open(f"/proc/{process}/comm", encoding="utf-8") as file:
        return file.read().strip()


def end_of(process):
    """The final answer of a process."""
    output, messages = process.communicate(timeout=60)
    assert process.returncode == 0, output + messages
    return json.loads(output.splitlines()[-1])


@pytest.fixture
def make_site(coldrise, point, network, tmp_path):
    sites = []

    def make(kind="vcenter"):
        vcenter = Vcenter(network, tmp_path / "vcenter", kind)
        vmx = tmp_path / "empty.vmx"
        vmx.touch()
        vcenter.make_datastore_folder(SESSION, NAME, vmx)
        sites.append(Site(coldrise, vcenter, point))
        return sites[-1]

    yield make
    for site in sites:
        site.close()
        site.vcenter.close()


@pytest.fixture
def site(make_site):
    return make_site()


@pytest.fixture
def served(site, nfs):
    """The same with an existing NFS server: commands end when the machine runs."""
    site.nfs = nfs("--versions", "3", "--idle", "1")
    return site


def test_a_machine_runs_from_the_datastore_and_is_undone(make_site, mount, image):
    site = make_site()
    # The simulator opens the .vmx through a mount of the repository.
    vmx = site.vcenter.folder / DATASTORE / SESSION / f"{SESSION}.vmx"
    vmx.unlink()
    vmx.symlink_to(mount().folder / "live" / SESSION / vmx.name)
    before = site.vcenter.look()["sessions"]
    process, event = site.recover("--host", OTHER)
    assert event["machine"] == NAME and event["serves_nfs"] and event["elapsed_ms"] < 10_000, event
    seen = site.vcenter.look()
    path = "/coldrise/live"
    assert seen["nas"] == {DATASTORE: {"server": "127.0.0.1", "path": path, "hosts": [HOST, OTHER]}}
    machine = seen["machines"][NAME]
    assert machine["state"] == "poweredOn" and machine["host"] == HOST
    assert machine["connected"] == [False], "no network unless asked"
    assert machine["addresses"] == ["00:0c:29:00:00:01"], "the card is the same otherwise"
    assert machine["path"] == f"[{DATASTORE}] {SESSION}/{SESSION}.vmx"
    assert seen["sessions"] == before, "each command logs out"
    # The hosts mount our files.
    root = nfs3.mount(site.vcenter.network, path)
    with nfs3.Nfs(site.vcenter.network) as client:
        assert b"vda.vmdk" in client.read_all(client.walk(root, f"{SESSION}/{SESSION}.vmx"))
        assert client.read_all(client.walk(root, f"{SESSION}/vda-flat.vmdk")) == image.content
    listed = site.coldrise.json("sessions")["recoveries"][0]
    assert listed["phase"] == "running" and f"{NAME} at {site.vcenter.server} runs" in listed["sentence"]
    assert PASSWORD not in json.dumps(listed)
    refused = site.coldrise.run("unpublish", SESSION)
    assert refused.returncode == 11 and "--undo" in refused.stderr
    undone = site.undo("--discard")
    assert undone["discarded"] and end_of(process)["state"] == "undone"
    assert site.is_clean()
    calls = site.vcenter.calls()
    order = [calls.index(name) for name in ("PowerOffVM_Task", "UnregisterVM", "RemoveDatastore")]
    assert order == sorted(order) and calls.count("RemoveDatastore") == 2


def test_the_command_may_be_killed_at_each_step(served):
    steps = ["CreateNasDatastore", "RegisterVM_Task", "ReconfigVM_Task", "PowerOnVM_Task"]
    for times, step in enumerate(steps, 1):
        # The task, or that of a later step, waits: the command is killed before it is done.
        served.vcenter.order("hold", {"RegisterVM_Task": "RegisterVm"}.get(step, "PowerOn"))
        before = served.vcenter.calls().count(step)
        process = served.start(*served.recovery())
        served.vcenter.wait_for(step, before + 1)
        process.kill()
        process.communicate()
        served.vcenter.order("clear")
        doctor = served.coldrise.run("doctor").stdout
        assert f"session {SESSION}" in doctor and "coldrise recover live/" in doctor, (step, doctor)
        if times % 2:
            # Either it continues ...
            again = served.json(*served.recovery(address=f"live/{SESSION}", host=None))
            assert again["state"] == "running"
            seen = served.vcenter.look()
            assert seen["machines"][NAME]["state"] == "poweredOn" and len(seen["nas"]) == 1
        # ... or it is undone.
        served.undo("--discard")
        assert served.is_clean(), step


def test_questions_of_vcenter_are_answered_as_requested(served):
    served.vcenter.order("question")
    served.json(*served.recovery())
    assert served.vcenter.answered() == ["1"], "moved: the UUID stays"
    served.undo()
    served.json(*served.recovery("--new-uuid", "--network", "same"))
    assert served.vcenter.look()["machines"][NAME]["connected"] == [True]
    assert served.vcenter.answered() == ["1", "2"], "copied"
    served.undo()
    assert served.is_clean()


def test_faults_leave_nothing_and_give_advice(served):
    vcenter = served.vcenter
    wrong = vcenter.folder / "wrong"
    wrong.write_text("wrong", encoding="utf-8")
    for fault, arguments, said in [
        (None, served.recovery(password_file=wrong), "password is wrong"),
        (None, served.recovery(host="esx9"), "there is no host esx9; there are: DC0_"),
        (None, served.recovery(host=None), "give --host NAME"),
        (None, served.recovery("--name", "other"), "failed: NotFound"),
        (("RegisterVM_Task", "DuplicateName"), served.recovery(), "give another --name"),
        (("CreateNasDatastore", "PlatformConfigFault"), served.recovery(), "at port 2049"),
        (("PowerOnVM_Task", "InsufficientHostCapacityFault"), served.recovery(), "InsufficientHostCapacityFault"),
        (("PowerOnVM_Task", "NoPermission"), served.recovery(), "lacks the privilege"),
    ]:
        if fault:
            vcenter.order("fault", *fault)
        message = served.refused(*arguments)
        assert said in message, message
        vcenter.order("clear")
        assert served.is_clean(), message
    # Without the certificate the password is not sent.
    access = ["--user", USER, "--password-file", vcenter.password_file]
    message = served.refused("recover", served.address, "--to", f"vcenter:{vcenter.server}", "--host", HOST, *access)
    assert "--certificate" in message, message
    access = ["--user", USER, "--certificate", vcenter.certificate]
    arguments = ["recover", served.address, "--to", f"vcenter:{vcenter.server}", "--host", HOST, *access]
    assert "COLDRISE_VSPHERE_PASSWORD" in served.refused(*arguments)
    assert "password is wrong" in served.refused(*arguments, COLDRISE_VSPHERE_PASSWORD="other")
    assert vcenter.calls().count("PowerOnVM_Task") == 2


def test_a_pinned_certificate(served):
    vcenter = served.vcenter
    shown = vcenter.thumbprint()
    # A name that the certificate has not.
    elsewhere = f"vcenter:localhost:{vcenter.port}"
    access = ["--host", HOST, "--user", USER, "--password-file", vcenter.password_file]
    command = ["recover", served.address, "--to", elsewhere, *access]
    refused = served.refused(*command, "--certificate", vcenter.certificate)
    assert shown in refused, "it can be compared"
    for wrong in (shown[:-2] + ("00" if shown[-2:] != "00" else "01"), shown[3:] + ":AA"):
        refused = served.refused(*command, "--thumbprint", wrong)
        assert "another thumbprint" in refused and shown in refused and "--thumbprint" in refused, refused
    for wrong, said in [(shown[:59], "SHA-1"), (shown[:92], "has 62"), ("x", "32 bytes")]:
        done = served.run(*command, "--thumbprint", wrong)
        assert done.returncode == 2 and said in done.stdout + done.stderr, done.stdout + done.stderr
    assert vcenter.calls() == [] and served.sessions() == []
    for right in (shown, shown.lower()):
        served.json(*command, "--thumbprint", right)
        # The session's note has it.
        served.undo()
        assert served.is_clean()


def test_a_failed_cleanup_can_be_repeated(served):
    vcenter = served.vcenter
    vcenter.order("fault", "PowerOnVM_Task", "InsufficientHostCapacityFault")
    vcenter.order("fault", "UnregisterVM", "NoPermission")
    done = served.run(*served.recovery())
    assert done.returncode == 1 and "InsufficientHostCapacityFault" in done.stdout
    assert "cleaning up failed" in done.stderr and f"live/{SESSION} --undo" in done.stdout + done.stderr
    assert len(vcenter.look()["nas"]) == 1, "the datastore stays while the machine is registered"
    assert "was not completed" in served.coldrise.run("sessions").stdout
    vcenter.order("clear")
    served.undo()
    assert served.is_clean()
    # An undo that stops after switching the machine off.
    served.json(*served.recovery())
    vcenter.order("fault", "UnregisterVM", "NoPermission")
    assert "lacks the privilege" in served.refused("recover", f"live/{SESSION}", "--undo")
    for output in (served.coldrise.run("doctor").stdout, served.coldrise.run("sessions").stdout):
        assert "was not completed" in output and f"live/{SESSION} --undo" in output, output
    vcenter.order("clear")
    served.undo()
    assert served.is_clean()
    # The server is gone permanently.
    served.json(*served.recovery())
    vcenter.order("fault", "Login", "InvalidLogin")
    assert "password is wrong" in served.refused("recover", f"live/{SESSION}", "--undo")
    undone = served.undo("--without-server")
    assert served.sessions() == [] and not undone["machine_ended"]


def test_the_nfs_server_of_the_command_ends_and_restarts(site):
    process, _ = site.recover()
    process.send_signal(signal.SIGTERM)
    assert end_of(process)["state"] == "stalled"
    again, event = site.recover(address=f"live/{SESSION}", host=None)
    assert event["serves_nfs"] and site.vcenter.calls().count("PowerOnVM_Task") == 1
    again.kill()
    again.communicate()
    wrong = site.refused("recover", f"live/{SESSION}", "--to", "vcenter:127.0.0.1:1")
    assert f"is at {site.vcenter.server}" in wrong
    site.undo()
    assert site.is_clean()


def test_the_nfs_server_of_a_killed_command_does_not_count_as_running(site):
    process, _ = site.recover()
    ganesha, = [child for child in children(process.pid) if name_of(child) == "ganesha.nfsd"]
    # It cannot end yet, and listens.
    with stopped(ganesha):
        process.kill()
        process.communicate()
        for output in (site.coldrise.run("doctor").stdout, site.coldrise.run("sessions").stdout):
            assert "no NFS server serves the disks of web01-recovered" in output, output
        again = site.start(*site.recovery(address=f"live/{SESSION}", host=None))
        says(again, "another server listens on 127.0.0.1:2049; waiting")
    event = json.loads(again.stdout.readline())
    assert event["event"] == "running" and event["serves_nfs"], event
    assert "no NFS server serves" not in site.coldrise.run("doctor").stdout
    # It is the server of this command.
    assert [name_of(child) for child in children(again.pid)].count("ganesha.nfsd") == 1
    nfs3.mount(site.vcenter.network, "/coldrise/live")
    site.undo("--discard")
    assert end_of(again)["state"] == "undone" and site.is_clean()


def test_a_foreign_server_is_not_mistaken_for_ours(site, tmp_path):
    listening = "import socket\ns = socket.create_server(('127.0.0.1', 2049))\nprint('', flush=True)\nwhile True: s.accept()"
    foreign = site.vcenter.network.command(sys.executable, "-c", listening)
    foreign = subprocess.Popen(foreign, stdout=subprocess.PIPE)
    site.processes.append(foreign)
    assert foreign.stdout.readline() == b"\n"
    process = site.start(*site.recovery(), clock=(clock := BothClocks(tmp_path)))
    says(process, "another server listens on 127.0.0.1:2049; waiting")
    clock.skip(21)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "another server listens on 127.0.0.1:2049: end it" in output, output
    assert site.is_clean() and "RegisterVM_Task" not in site.vcenter.calls()


def test_the_nfs_server_keeps_running_for_other_machines(site):
    vmx = site.vcenter.folder / "empty"
    vmx.touch()
    site.vcenter.make_datastore_folder("second", "second", vmx)
    first, _ = site.recover()
    assert site.json(*site.recovery("--name", "second", host=OTHER))["state"] == "running"
    site.undo("--discard")
    says(first, "second of session second does")
    nfs3.mount(site.vcenter.network, "/coldrise/live")
    assert first.poll() is None
    site.json("recover", "live/second", "--undo", "--discard")
    assert end_of(first)["state"] == "undone" and site.is_clean()


def test_a_machine_moves_to_a_datastore(served, tmp_path):
    vcenter = served.vcenter
    served.json(*served.recovery())
    live = f"live/{SESSION}"
    assert "--to DATASTORE" in served.refused("move", live)
    assert "--to DATASTORE" in served.refused("move", live, tmp_path)
    assert "it has: LocalDS_0" in served.refused("move", live, "--to", "nowhere")
    vcenter.order("fault", "RelocateVM_Task", "RestrictedVersion")
    assert "RestrictedVersion" in served.refused("move", live, "--to", "LocalDS_0")
    vcenter.order("clear")
    # Ctrl-C cancels the task.
    vcenter.order("hold", "RelocateVm")
    process = served.start("move", live, "--to", "LocalDS_0")
    vcenter.wait_for("RelocateVM_Task", 2)
    assert "is being moved" in served.coldrise.run("sessions").stdout
    assert "move" in served.refused("recover", live, "--undo")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130 and "CancelTask" in vcenter.calls()
    assert "runs on session" in served.coldrise.run("sessions").stdout


def test_a_killed_move_is_resumed_and_completed(served):
    vcenter, live = served.vcenter, f"live/{SESSION}"
    served.json(*served.recovery())
    vcenter.order("hold", "RelocateVm")
    process = served.start("move", live, "--to", "LocalDS_0")
    vcenter.wait_for("RelocateVM_Task")
    process.kill()
    process.communicate()
    assert "being moved" in served.refused("recover", live, "--undo")
    assert "follows it" in served.refused(*served.recovery(address=live, host=None))
    # The copy is complete, but the next step fails at first.
    vcenter.order("fault", "RemoveDatastore", "HostConfigFault")
    process = served.start("move", live)
    says(process, "following that")
    vcenter.order("release")
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "run the command again" in output, output
    vcenter.order("clear")
    assert vcenter.calls().count("RelocateVM_Task") == 1
    assert "was moved to LocalDS_0" in served.coldrise.run("sessions").stdout
    moved = served.json("move", live)
    assert moved["datastore"] == "LocalDS_0" and moved["address"]
    seen = vcenter.look()
    assert seen["nas"] == {} and seen["machines"][NAME]["state"] == "poweredOn"
    assert seen["machines"][NAME]["datastores"] == ["LocalDS_0"]
    for command in (["recover", live, "--undo"], ["boot", live], served.recovery(address=live, host=None)):
        assert "start it there" in served.refused(*command)
    wait_until(lambda: served.coldrise.run("unpublish", SESSION).returncode == 0, "the NFS server closes the session")
    assert NAME in vcenter.look()["machines"]


def test_ctrl_c_does_not_wait_for_a_silent_vcenter(served, tmp_path):
    vcenter, live = served.vcenter, f"live/{SESSION}"

    def interrupted_in_silence(call, *command):
        before = vcenter.calls().count(call)
        process = served.start(*command, clock=(clock := BothClocks(tmp_path)))
        vcenter.wait_for(call, before + 1)
        with stopped(vcenter.process.pid):
            process.send_signal(signal.SIGINT)
            # Not the 120 s that one request may take.
            wait_until(lambda: clock.offset_s < 60 and clock.skip(1) or process.poll() is not None, "the end")
            _, messages = process.communicate(timeout=30)
        assert process.returncode not in (0, -signal.SIGINT), messages
        assert "cancelled" in messages, messages
        vcenter.order("clear")
        return messages

    vcenter.order("hold", "PowerOn")
    messages = interrupted_in_silence("PowerOnVM_Task", *served.recovery())
    assert f"session {SESSION} is kept: coldrise recover {live} --undo" in messages
    served.undo()
    assert served.is_clean()
    # One that answers, but waits for an answer: the machine is removed again.
    vcenter.order("hold", "PowerOn")
    process = served.start(*served.recovery())
    vcenter.wait_for("PowerOnVM_Task", 2)
    process.send_signal(signal.SIGINT)
    asked = vcenter.questions()
    wait_until(lambda: vcenter.questions() > asked + 1, "it asks again")
    vcenter.order("clear")
    process.communicate(timeout=60)
    assert process.returncode == 130 and served.is_clean()
    served.json(*served.recovery())
    vcenter.order("hold", "RelocateVm")
    messages = interrupted_in_silence("RelocateVM_Task", "move", live, "--to", "LocalDS_0")
    assert f"coldrise move {live} follows it" in messages
    assert "being moved" in served.coldrise.run("sessions").stdout
    assert served.json("move", live)["datastore"] == "LocalDS_0"
    assert vcenter.calls().count("RelocateVM_Task") == 1


def test_two_machines_share_the_datastore(served):
    vmx = served.vcenter.folder / "empty"
    vmx.touch()
    served.vcenter.make_datastore_folder("second", "second", vmx)
    served.json(*served.recovery())
    served.json(*served.recovery("--name", "second", host=OTHER))
    served.undo()
    seen = served.vcenter.look()
    assert NAME not in seen["machines"] and seen["machines"]["second"]["state"] == "poweredOn"
    assert seen["nas"][DATASTORE]["hosts"] == [HOST, OTHER]
    served.json("recover", "live/second", "--undo")
    assert served.is_clean()


def test_a_single_esxi(make_site):
    site = make_site("esxi")
    process, event = site.recover(kind="esxi", host=None)
    assert site.vcenter.look()["machines"][NAME]["state"] == "poweredOn"
    assert "needs vCenter" in site.refused("move", f"live/{SESSION}", "--to", "LocalDS_0")
    site.undo()
    assert end_of(process)["state"] == "undone" and site.is_clean()
    assert os.path.exists(site.vcenter.folder)
