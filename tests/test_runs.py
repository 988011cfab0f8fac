"""Every long command is a run with a folder: running, ok, failed, cancelled or lost."""

import json
import os
import pathlib
import socket
import subprocess
import time

import pytest

from support.cli import PROGRAM, Coldrise
from support.nbdserver import wait_until
from support.image import Image
from support.sources import RunningBackup, gated_server, slow_server, tool
from support.stopped import stopped

pytestmark = pytest.mark.encrypted

MIB = 1 << 20
OLD = "20250101T000000Z"
# MB/s of a backup that is ended: it lasts longer than a few programs take to start on a busy machine.
LASTING = 1


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state" / "runs"


@pytest.fixture
def recorded(coldrise, folder):
    """The repository of the fixture, with runs."""
    return Coldrise(coldrise.repository, coldrise.passphrase_file, runs=folder)


@pytest.fixture
def disk(tmp_path):
    image = Image(24 * MIB)
    image.fill(0, 24 * MIB, "random")
    return image.save(tmp_path / "random.raw")


@pytest.fixture
def tmpfs(tmp_path):
    """Mounts a small file system; all are unmounted at the end."""
    mounted = []

    def mount(*options):
        place = tmp_path / f"small{len(mounted)}"
        place.mkdir()
        tool("mount", "-t", "tmpfs", "-o", ",".join(["mode=700", *options]), "tmpfs", place)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        tool("umount", "--lazy", place)


def runs(coldrise, *options):
    return coldrise.json("runs", *options)["runs"]


def states(coldrise):
    return [(run["plan"]["machine"], run["state"]) for run in runs(coldrise)]


def test_each_long_command_is_a_run_and_others_are_not(recorded, disk, folder):
    recorded.backup("web01", vda=disk)
    recorded.json("verify", "web01/latest")
    recorded.json("restore", "web01/latest/vda", disk.parent / "restored.raw")
    for command in (["list"], ["gc", "--dry-run"], ["sessions"], ["prune", "--keep-last", "1", "--dry-run"]):
        recorded.json(*command)
    assert recorded.run("prune", "--keep-last", "1").returncode == 0
    assert recorded.run("gc").returncode == 0
    missing = recorded.run("backup", "db01", "vda=raw:/nowhere/disk")
    found = {run["plan"]["command"]: run for run in reversed(runs(recorded))}
    assert list(found) == ["backup", "verify", "restore", "prune", "gc"]
    assert [run["state"] for run in found.values()] == ["failed", "ok", "ok", "ok", "ok"]
    assert found["restore"]["plan"]["machine"] == "web01" and found["restore"]["plan"]["point"] == "latest"
    assert found["backup"]["plan"]["repository"] == str(recorded.repository)
    result = found["backup"]["result"]
    assert result["exit_code"] == missing.returncode == 1
    assert result["error"]["kind"] == "not_found"
    assert found["gc"]["result"]["counts"]["elapsed_ms"] >= 0
    shown = recorded.run("runs", "show", found["backup"]["id"])
    assert "exit code  1" in shown.stdout and "/nowhere/disk" in shown.stdout
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_killed_backup_is_reported_as_lost(recorded, disk):
    with slow_server(disk, LASTING) as (uri, _server):
        running = RunningBackup(recorded, "web01", f"vda={uri}")
        [run] = runs(recorded)
        assert run["state"] == "running" and run["progress"]["disk"] == "vda"
        listed = recorded.run("runs").stdout
        assert "running" in listed and "web01" in listed and "%" in listed
        running.process.kill()
        running.process.communicate(timeout=30)
    [run] = runs(recorded)
    assert run["state"] == "lost" and run["result"] is None
    assert run["problems"] == ["lost: its process is gone"]
    refused = recorded.run("runs", "cancel", run["id"])
    assert refused.returncode == 1 and "has ended" in refused.stderr


def test_a_run_of_an_earlier_start_of_the_host_is_lost(recorded, disk, folder):
    recorded.backup("web01", vda=disk)
    [run] = runs(recorded)
    (folder / run["id"] / "result.json").unlink()
    plan = run["plan"]
    plan["who"]["boot_id"] = "another"
    (folder / run["id"] / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    [run] = runs(recorded)
    assert run["state"] == "lost" and "restarted" in run["problems"][0]


def test_cancel_from_another_process_ends_a_backup_as_ctrl_c_does(recorded, disk):
    with slow_server(disk, LASTING) as (uri, _server):
        running = RunningBackup(recorded, "web01", f"vda={uri}")
        [run] = runs(recorded)
        done = recorded.json("runs", "cancel", run["id"])
        code, last, messages = running.end()
    assert done["state"] == "cancelled"
    assert code == 130 and last["error"]["kind"] == "interrupted"
    assert "no restore point was made" in messages
    assert recorded.json("list")["machines"] == []
    [run] = runs(recorded)
    assert run["state"] == "cancelled" and run["result"]["exit_code"] == 130


def test_a_server_is_followed_and_cancelled(recorded, tmp_path):
    address = tmp_path / "socket"
    server = recorded.start("serve", "nbd", "--socket", address, stdout=subprocess.PIPE)
    assert server.stdout.readline().startswith("ready")
    [run] = runs(recorded)
    assert run["plan"]["command"] == "serve nbd" and run["state"] == "running"
    follower = recorded.start("runs", "show", run["id"], "--follow", stdout=subprocess.PIPE)
    assert recorded.json("runs", "cancel", run["id"])["state"] == "ok"
    assert server.wait(timeout=30) == 0
    output, _ = follower.communicate(timeout=30)
    assert "cancelled from another process" in output and f"{run['id']}: ok" in output


def test_a_silent_client_of_the_control_socket_does_not_block_others(recorded, disk, folder):
    with slow_server(disk, LASTING) as (uri, _server):
        running = RunningBackup(recorded, "web01", f"vda={uri}")
        [run] = runs(recorded)
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as garbage:
            descriptor = os.open(folder / run["id"], os.O_RDONLY)
            for client in (silent, garbage):
                client.connect(f"/proc/self/fd/{descriptor}/control")
            garbage.sendall(b"\xff" * 100_000)
            assert recorded.json("runs", "cancel", run["id"])["state"] == "cancelled"
            os.close(descriptor)
        assert running.end()[0] == 130


def test_two_backups_run_concurrently(recorded, disk):
    # nbdkit can fail an assertion when a client leaves in the middle of an answer: each has its own.
    with slow_server(disk, LASTING) as (first, _), gated_server(disk, 4 * MIB) as (second, _, gate):
        both = [RunningBackup(recorded, name, f"vda={uri}") for name, uri in (("web01", first), ("web02", second))]
        found = {run["plan"]["machine"]: run for run in runs(recorded)}
        assert {run["state"] for run in found.values()} == {"running"}
        recorded.json("runs", "cancel", found["web01"]["id"])
        assert both[0].end()[0] == 130
        gate.touch()
        both[1].end()
    assert sorted(states(recorded)) == [("web01", "cancelled"), ("web02", "ok")]


def test_no_secret_is_recorded(recorded, disk, folder):
    script = f"cat {recorded.passphrase_file}; : hidden-word"
    recorded.passphrase_file, kept = None, recorded.passphrase_file
    words = ["--verbose", "--passphrase-command", script]
    for source in (f"vda={disk}", "vda=nbd://user:hidden-word@127.0.0.1:1/disk"):
        recorded.run(*words, "backup", "web01", source)
    recorded.run("--verbose", f"--passphrase-command={script}", "verify")
    recorded.passphrase_file = kept
    assert [run["state"] for run in runs(recorded)] == ["ok", "failed", "ok"]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 9
    for path in files:
        text = path.read_bytes()
        assert b"hidden-word" not in text and b"correct horse" not in text, path
        assert path.stat().st_mode & 0o777 == 0o600
    assert any("nbd://***@127.0.0.1" in path.read_text(encoding="utf-8") for path in files)


def one_warning(done):
    return done.stderr.count("the record of this run is not complete") == 1


def test_a_full_disk_under_the_runs_does_not_fail_backups(recorded, disk, tmpfs):
    place = tmpfs("size=64k")
    (place / "filler").write_bytes(bytes(64 << 10))
    recorded.runs = place / "runs"
    done = recorded.run("backup", "web01", f"vda={disk}")
    assert done.returncode == 0 and one_warning(done), done.stderr
    assert runs(recorded) == []
    # Full at the end only: the run is lost, not ok.
    (place / "filler").unlink()
    with slow_server(disk) as (uri, _server):
        running = RunningBackup(recorded, "web02", f"vda={uri}")
        # Its own log may take the space that was just counted.
        with pytest.raises(OSError), open(place / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        code, _last, messages = running.end()
    assert code == 0 and messages.count("the record of this run is not complete") == 1
    assert [run["state"] for run in runs(recorded)] == ["lost"]


def test_an_unwritable_runs_folder_does_not_fail_backups(recorded, disk, tmpfs, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for place in (tmpfs("ro") / "runs", tmp_path / "file" / "runs", shared):
        recorded.runs = place
        done = recorded.run("backup", "web01", f"vda={disk}")
        assert done.returncode == 0 and one_warning(done), done.stderr
        assert recorded.run("--quiet", "verify").stderr == ""
    assert list(shared.iterdir()) == []


def test_runs_none_records_nothing(coldrise, disk, tmp_path):
    coldrise.backup("web01", vda=disk)
    refused = coldrise.run("runs")
    assert refused.returncode == 2 and "COLDRISE_RUNS" in refused.stderr
    # The default of other users than root.
    home = tmp_path / "home"
    home.mkdir()
    program = Coldrise(coldrise.repository, coldrise.passphrase_file, runs="")
    listed = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", program_file(tmp_path), "runs"],
        env=program.environment() | {"HOME": str(home), "XDG_STATE_HOME": "/state"},
        capture_output=True, text=True, check=False)  # fmt: skip
    assert "no runs in /state/coldrise/runs" in listed.stdout, listed.stderr


def program_file(tmp_path):
    """The program, where every user finds it."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    copy = tmp_path / "coldrise"
    copy.write_bytes(pathlib.Path(PROGRAM).read_bytes())
    copy.chmod(0o755)
    return copy


def run_folder(folder, number, time_text=OLD):
    path = folder / f"{time_text}-{number:04x}-backup"
    path.mkdir(mode=0o700, parents=True)
    return path


def test_hostile_files_are_named_and_harmless(recorded, disk, folder, tmp_path):
    recorded.backup("web01", vda=disk)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "plan.json").write_text("{}", encoding="utf-8")
    garbage = run_folder(folder, 1)
    (garbage / "plan.json").write_bytes(b"\xff\x00{")
    (garbage / "result.json").write_text('{"exit_code": 0', encoding="utf-8")
    (garbage / "log").write_bytes(b"\n\xff\n" + b"x" * 200_000)
    pipes = run_folder(folder, 2)
    for name in ("plan.json", "lock", "control", "log", "result.json"):
        os.mkfifo(pipes / name)
    folders = run_folder(folder, 3)
    for name in ("lock", "plan.json"):
        (folders / name).mkdir()
    links = run_folder(folder, 4)
    for name in ("plan.json", "lock", "log", "control", "result.json"):
        (links / name).symlink_to(outside / "plan.json")
    (folder / f"{OLD}-0005-backup").symlink_to(outside)
    (folder / f"{OLD}-0006-backup").write_text("", encoding="utf-8")
    (folder / "a\nname\x1b[2J").mkdir()
    huge = run_folder(folder, 7)
    with open(huge / "plan.json", "wb") as file:
        file.truncate(1 << 40)
    plan = runs(recorded)[0]["plan"]
    plan["machine"], plan["started_at_ms"] = "web\x1b[2J", 2**64 - 1
    tricky = run_folder(folder, 8)
    (tricky / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (tricky / "log").write_text('{"at_ms": 18446744073709551615, "level": "\x1b", "progress": [1]}\n', encoding="utf-8")

    answer = recorded.json("runs")
    found = {run["id"][17:21]: run for run in answer["runs"] if run["id"].startswith(OLD)}
    assert {number: run["state"] for number, run in found.items()} == dict.fromkeys(
        ["0001", "0002", "0003", "0004", "0007", "0008"], "lost")
    for number, words in {
        "0001": ["plan.json: it is damaged", "result.json: it is damaged"],
        "0002": ["plan.json: it is not a regular file", "lock: it is not a regular file"],
        "0003": ["plan.json: it is not a regular file", "lock: it is not a regular file"],
        "0004": ["plan.json: it is a symbolic link", "lock: it is a symbolic link"],
        "0007": ["plan.json: it is longer than 65536 bytes"],
    }.items():
        problems = "; ".join(found[number]["problems"])
        assert all(word in problems for word in words), problems
    unknown = [entry["name"] for entry in answer["unknown"]]
    assert unknown == [f"{OLD}-0005-backup", f"{OLD}-0006-backup", "a\nname\x1b[2J"]
    listed = recorded.run("runs")
    assert listed.returncode == 0 and "\x1b" not in listed.stdout + listed.stderr
    for run in answer["runs"]:
        shown = recorded.run("runs", "show", run["id"], "--follow", timeout_s=20)
        assert shown.returncode == 0 and "\x1b" not in shown.stdout
        assert recorded.run("runs", "cancel", run["id"], timeout_s=20).returncode == 1
    for text in ("../../etc", "", "x" * 5000):
        assert recorded.run("runs", "show", text).returncode == 2
    # A new run works despite them, and nothing outside was touched.
    recorded.backup("web02", vda=disk)
    assert [path.name for path in outside.iterdir()] == ["plan.json"]


def test_the_result_of_another_run_is_ignored(recorded, disk, folder):
    """A power cut can leave the bytes of a removed file in a new one."""
    recorded.backup("web01", vda=disk)
    recorded.json("gc")
    gc, backup = [folder / run["id"] for run in runs(recorded)]
    assert json.loads((gc / "result.json").read_text())["run"] == gc.name
    (gc / "result.json").write_bytes((backup / "result.json").read_bytes())
    [damaged, _] = runs(recorded)
    assert damaged["state"] == "lost" and damaged["problems"][0] == "result.json: it is that of another run"
    # Older results name no run.
    old = json.loads((backup / "result.json").read_text())
    del old["run"]
    (gc / "result.json").write_text(json.dumps(old))
    assert runs(recorded)[0]["state"] == "ok"


def test_old_runs_beyond_the_newest_thousand_are_removed_a_few_at_a_time(recorded, folder):
    for number in range(1100):
        (run_folder(folder, number) / "lock").write_text("", encoding="utf-8")
    young = time.strftime("%Y%m%dT000000Z", time.gmtime())
    for number in range(200):
        (run_folder(folder, number, young) / "lock").write_text("", encoding="utf-8")
    recorded.json("gc")
    assert len(runs(recorded, "--all")) == 1300 - 200 + 1
    recorded.json("gc")
    left = runs(recorded, "--all")
    # The run itself is not counted.
    assert len(left) == 1001
    assert sum(run["id"].startswith(young) for run in left) >= 200
    answer = recorded.json("runs")
    assert len(answer["runs"]) == 20 and answer["hidden"] == 981


def planned(recorded, folder, *arguments, number=0x8000, request=None):
    """Plans a run as the service does; returns its id."""
    run_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{number:04x}-backup"
    place = folder / f".{run_id}.planned"
    place.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (place / "lock").touch(0o600)
    words = ["--repo", str(recorded.repository), "--passphrase-file", str(recorded.passphrase_file), *map(str, arguments)]
    plain = request if request is not None else {"arguments": words, "job": "nightly", "requested_by": "operator", "attempt": 2}
    (place / "request.json").write_text(json.dumps(plain), encoding="utf-8")
    return run_id


def bare(recorded):
    """The program without the repository in its environment, as the service starts it."""
    program = Coldrise("", None, runs=recorded.runs)
    return program


def test_a_planned_run_becomes_its_command_once(recorded, disk, folder):
    with slow_server(disk) as (uri, _server):
        run_id = planned(recorded, folder, "backup", "web01", f"vda={uri}")
        running = [bare(recorded).start("run", run_id, stderr=subprocess.PIPE) for _ in range(4)]
        outputs = [process.communicate(timeout=60)[1] for process in running]
    assert sorted(process.returncode for process in running) == [0, 11, 11, 11], outputs
    again = bare(recorded).run("run", run_id)
    assert again.returncode == 11 and "has begun already" in again.stderr
    [run] = runs(recorded)
    assert (run["id"], run["state"]) == (run_id, "ok")
    plan = run["plan"]
    assert (plan["command"], plan["machine"], plan["repository"]) == ("backup", "web01", str(recorded.repository))
    assert (plan["job"], plan["requested_by"], plan["attempt"]) == ("nightly", "operator", 2)
    assert "operator" in recorded.run("runs", "show", run_id).stdout
    assert sorted(path.name for path in folder.iterdir() if ".planned" in path.name) == []
    assert not (folder / run_id / "request.json").exists()
    assert bare(recorded).run("run", f"{OLD}-8000-gc").returncode == 1
    assert bare(recorded).run("--json", "run", run_id).returncode == 2


def test_short_commands_are_runs_if_they_are_planned(recorded, disk, folder):
    address = recorded.backup("web01", vda=disk)
    recorded.json("protect", address)
    assert len(runs(recorded)) == 1
    run_id = planned(recorded, folder, "unprotect", address)
    assert bare(recorded).run("run", run_id).returncode == 0
    assert [(run["plan"]["command"], run["state"]) for run in runs(recorded)] == [("unprotect", "ok"), ("backup", "ok")]


def test_output_of_a_detached_run_is_bounded(recorded, folder, tmp_path):
    run_id = planned(recorded, folder, "serve", "nbd", "--socket", tmp_path / "socket")
    output = folder / f".{run_id}.planned" / "output"
    with output.open("ab") as file:
        process = subprocess.Popen([PROGRAM, "run", run_id], env=bare(recorded).environment(), stdout=file,
                                   stderr=file, stdin=subprocess.DEVNULL)
    try:
        output = folder / run_id / "output"
        wait_until(lambda: output.exists() and b"ready" in output.read_bytes(), "the server")
        first = output.read_bytes()
        # The next check finds all of it: output between a check and the cut is lost, and output
        # after the cut may be too short for another one.
        with stopped(process.pid), output.open("ab") as file:
            for number in range(30):
                file.write(b"%07d\n" % number * (1 << 17))
        wait_until(lambda: output.stat().st_size <= 1 << 20, "a short output")
        assert output.read_bytes().startswith(first)
        end = output.with_name("output.1")
        assert end.stat().st_size == 1 << 20 and end.read_bytes().endswith(b"0000029\n")
        assert process.poll() is None and runs(recorded)[0]["state"] == "running"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_plans_that_cannot_run_are_recorded_as_failed(recorded, folder, tmp_path):
    plans = {
        planned(recorded, folder, "list", number=0x8001): "cannot be planned",
        planned(recorded, folder, "run", f"{OLD}-8000-gc", number=0x8002): "cannot be planned",
        planned(recorded, folder, "backup", number=0x8003): "required",
        planned(recorded, folder, "--help", number=0x8004): "Usage",
        planned(recorded, folder, request={"arguments": "gc"}, number=0x8005): "damaged",
        planned(recorded, folder, request={"arguments": ["gc", 5]}, number=0x8006): "damaged",
        planned(recorded, folder, request={"arguments": ["x" * 100_000]}, number=0x8007): "longer than 65536",
        planned(recorded, folder, number=0x8008): "symbolic link",
        planned(recorded, folder, number=0x8009): "opening it",
    }  # fmt: skip
    outside = tmp_path / "outside.json"
    outside.write_text(json.dumps({"arguments": ["gc"]}), encoding="utf-8")
    link, missing = ([name for name in plans if f"-{number}-" in name][0] for number in ("8008", "8009"))
    for name in (link, missing):
        (folder / f".{name}.planned" / "request.json").unlink()
    (folder / f".{link}.planned" / "request.json").symlink_to(outside)
    for run_id, words in plans.items():
        done = bare(recorded).run("run", run_id)
        assert done.returncode not in (0, 11) and words in done.stderr, done.stderr
        [run] = [run for run in runs(recorded) if run["id"] == run_id]
        assert run["state"] == "failed" and run["problems"] == []
        assert run["result"]["error"]["message"].startswith("could not be started: ")
    assert list(folder.glob(".*.planned")) == [] and outside.exists()
    # The folder of a plan is a link: nothing is followed.
    (folder / f".{OLD}-8000-gc.planned").symlink_to(tmp_path)
    refused = bare(recorded).run("run", f"{OLD}-8000-gc")
    assert refused.returncode == 1 and list(folder.glob(f"{OLD}*")) == []


def test_a_kill_at_the_start_of_a_planned_run_leaves_a_plan_or_a_run(recorded, disk, folder):
    """strace kills the process at each system call that changes the folder."""
    seen = set()
    for number in range(1, 40):
        run_id = planned(recorded, folder, "verify", number=0x8000 + number)
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=openat,rename,unlink,unlinkat,flock,mkdir",
                   "-e", f"inject=openat,rename,unlink,flock:signal=KILL:when={number * 5}", PROGRAM, "run", run_id]  # fmt: skip
        done = subprocess.run(command, env=bare(recorded).environment(), capture_output=True, timeout=60, check=False)
        names = {path.name for path in folder.iterdir() if run_id in path.name}
        assert names in ({run_id}, {f".{run_id}.planned"}), names
        if names == {run_id}:
            [run] = [run for run in runs(recorded) if run["id"] == run_id]
            state = run["state"]
            assert run["plan"]["command"] == "verify"
        else:
            # Planned as before: it can be started.
            state = "planned"
            assert bare(recorded).run("run", run_id).returncode == 0
        seen.add(state)
        if done.returncode == 0:
            break
    assert {"planned", "lost"} <= seen


def test_a_run_without_free_descriptors_can_be_cancelled_later(recorded, disk, folder, tmp_path):
    with slow_server(disk, LASTING) as (uri, _server):
        running = RunningBackup(recorded, "web01", f"vda={uri}")
        [run] = runs(recorded)
        pid = running.process.pid
        limit = tool("prlimit", "--pid", pid, "--nofile", "--noheadings", "--raw", "--output", "SOFT,HARD").split()
        trace, descriptor = tmp_path / "trace", os.open(folder / run["id"], os.O_RDONLY)
        control = f"/proc/self/fd/{descriptor}/control"
        strace = subprocess.Popen(["strace", "-f", "-p", str(pid), "-e", "trace=accept4", "-o", trace], stderr=subprocess.PIPE)
        try:
            assert b"attached" in strace.stderr.readline()
            # Lower than all that may be free between others.
            tool("prlimit", "--pid", pid, f"--nofile=3:{limit[1]}")
            # The first one takes the descriptor that the process got before it waited.
            with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as client:
                first.connect(control)
                first.sendall(b"none\n")
                client.connect(control)
                wait_until(lambda: "EMFILE" in trace.read_text(encoding="utf-8"), "a connection that cannot be accepted")
        finally:
            os.close(descriptor)
            strace.terminate()
            strace.communicate(timeout=30)
        tool("prlimit", "--pid", pid, f"--nofile={limit[0]}:{limit[1]}")
        assert recorded.json("runs", "cancel", run["id"])["state"] == "cancelled"
        assert running.end()[0] == 130
