"""coldrise backup --from libvirt: running domains, at one instant, and the leftovers of a failure."""

import contextlib
import os
import random
import signal
import subprocess

import pytest

from support.nbdserver import wait_until
from support.running import COUNTING_SECTOR, MIB, assert_one_instant, assert_same_as_now, restored
from support.sources import RunningBackup
from support.virsh import killed_at, on, path_with_virsh


@pytest.fixture
def refused(coldrise, libvirt, scratch):
    def backup(*options, folder=scratch):
        done = coldrise.run("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", folder, *options)
        assert done.returncode not in (0, 101), done.stdout
        return done.stderr

    return backup


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_only_changed_blocks_are_read(coldrise, domain, live, tmp_path, mode):
    running = domain()
    running.write("vda", "write -P 17 0 20M")
    full = live(*mode)
    assert full["disks"][0]["read_bytes"] >= 20 * MIB and not full["instant"]["remarks"]
    running.write("vda", "write -P 18 8M 1M")
    running.write("vda", "write -z 4M 64k")
    running.write("vdb", "write -P 19 63M 1M")
    part = live(*mode)
    assert [disk["read_bytes"] for disk in part["disks"]] == [MIB, MIB]
    assert [disk["base"] for disk in part["disks"]] == [full["point"]] * 2
    assert_same_as_now(coldrise, part["address"], running, tmp_path)
    # libvirt forgets the checkpoints of a transient domain; the images keep the bitmaps over a clean end.
    running.end()
    again = domain()
    assert again.checkpoints() == []
    again.write("vdb", "write -P 20 1M 64k")
    made = live(*mode)
    assert [disk["read_bytes"] for disk in made["disks"]] == [0, 65536]
    assert_same_as_now(coldrise, made["address"], again, tmp_path)


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_a_kill_at_each_step_loses_no_change(coldrise, libvirt, domain, scratch, tmp_path, live, mode):
    running = domain()
    running.write("vda", "write -P 1 0 4M")
    last = live(*mode)["point"]
    kinds = ["backup-begin", "checkpoint-delete"] if mode else ["backup-begin", "domjobabort", "checkpoint-delete"]
    steps = [(moment, request) for request in kinds for moment in ("before", "after")]
    for number, (moment, request) in enumerate(steps, 2):
        running.write("vda", f"write -P {number} {number}M 64k")
        with killed_at(tmp_path, moment, request):
            killed = coldrise.run("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch, *mode)
        assert killed.returncode == -signal.SIGKILL
        running.write("vdb", f"write -P {number} {number}M 64k")
        running.goes_on()
        stored = [point["point"] for point in coldrise.json("list", "web01")["machines"][0]["points"]]
        made = live(*mode)
        assert all(disk["is_incremental"] for disk in made["disks"]), (moment, request)
        # Killed after the point was stored, it counts.
        assert made["disks"][0]["base"] == stored[-1], (moment, request)
        assert (stored[-1] == last) == (request == "backup-begin"), (moment, request)
        last = made["point"]
        assert_same_as_now(coldrise, made["address"], running, tmp_path)
        assert len(running.checkpoints()) == 1 and not running.has_job(), (moment, request)


def test_a_lost_bitmap_is_reported_and_forces_a_full_read(coldrise, domain, live, tmp_path):
    running = domain(persistent=True)
    running.write("vda", "write -P 1 0 4M")
    live()
    os.kill(running.process(), signal.SIGKILL)
    wait_until(lambda: running.libvirt.state("web01").startswith("shut off"), "the end of the domain")
    running.libvirt.virsh("start", "web01", "--paused")
    running.write("vdb", "write -P 2 0 1M")
    made = live()
    assert not any(disk["is_incremental"] for disk in made["disks"])
    assert "vda: no checkpoint counts from web01/" in made["instant"]["remarks"][0]
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    assert len(running.checkpoints()) == 1
    assert all(disk["is_incremental"] for disk in live()["disks"])


def test_exchanged_disks_are_read_whole(coldrise, domain, live, tmp_path):
    """The bitmaps of all disks have one name: that of the backup."""
    running = domain()
    running.write("vda", "write -P 1 0 4M")
    running.write("vdb", "write -P 2 0 4M")
    live("system=vda", "data=vdb")
    made = live("system=vdb", "data=vda")
    assert not any(disk["is_incremental"] for disk in made["disks"])
    for disk, image in (("system", "vdb"), ("data", "vda")):
        assert any(f"{disk}: this is not the disk of the latest backup" in text for text in made["instant"]["remarks"])
        coldrise.run("restore", f"{made['address']}/{disk}", tmp_path / f"{disk}.raw")
        running.write(image, "flush")
        subprocess.run(["qemu-img", "compare", "-U", "-f", "raw", "-F", "qcow2", tmp_path / f"{disk}.raw", running.images[image]],
                       check=True)
    again = live("system=vdb", "data=vda")
    assert [disk["read_bytes"] for disk in again["disks"]] == [0, 0]


def test_a_damaged_latest_backup_does_not_end_the_next_one(libvirt, coldrise, domain, live, tmp_path):
    """What is compared with it cannot be read."""
    folder = libvirt.images / "web01"
    folder.mkdir()
    raw = tmp_path / "raw"
    with open(raw, "wb") as file:
        file.write(random.Random(1).randbytes(4 * MIB))
        file.truncate(64 * MIB)
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, folder / "vda.qcow2"], check=True)
    domain()
    live()
    # Not in the log, which is replayed, but in the files that it went into.
    coldrise.json("backup", "db01", f"vda=raw:{raw}")
    files = [path for path in (coldrise.repository / "db").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    # Each chunk, and not the index at the end.
    for at in range(20_000, len(content) - 100_000, 20_000):
        content[at] ^= 1
    largest.write_bytes(content)
    made = live()
    assert "vda: the latest backup is damaged" in made["instant"]["remarks"][0]
    assert [disk["is_incremental"] for disk in made["disks"]] == [False, True]


def test_internal_snapshots_need_the_checkpoint_removed(coldrise, libvirt, domain, live, tmp_path):
    """The steps of the message and of docs/recovery.md, command by command."""
    running = domain(persistent=True)
    running.write("vda", "write -P 1 0 1M")
    assert live()["instant"]["remarks"] == []
    libvirt.virsh("snapshot-create-as", "web01", "before")
    running.write("vda", "write -P 2 0 1M")
    (remark,) = live()["instant"]["remarks"]
    assert "web01 has internal snapshots" in remark and "virsh checkpoint-delete web01 NAME" in remark, remark
    # Once: repeated only within the second of the snapshot.
    wait_until(lambda: live()["instant"]["remarks"] == [], "a checkpoint after the snapshot")
    assert live()["instant"]["remarks"] == []
    with pytest.raises(AssertionError, match="Device has active dirty bitmaps"):
        libvirt.virsh("snapshot-revert", "web01", "before")
    assert libvirt.state("web01").startswith("shut off")
    with pytest.raises(AssertionError, match="cannot perform block operations while checkpoint exists"):
        libvirt.virsh("snapshot-create-as", "web01", "second")
    libvirt.virsh("start", "web01", "--paused")
    libvirt.virsh("checkpoint-delete", "web01", *libvirt.virsh("checkpoint-list", "web01", "--name").split())
    libvirt.virsh("snapshot-revert", "web01", "before")
    made = live()
    assert not any(disk["is_incremental"] for disk in made["disks"])
    remarks = "\n".join(made["instant"]["remarks"])
    assert "everything is read" in remarks and "web01 has internal snapshots" in remarks
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    # For a domain that is off.
    running.end()
    (checkpoint,) = running.checkpoints()
    revert = ["qemu-img", "snapshot", "-a", "before"]
    for image in running.images.values():
        refused = subprocess.run([*revert, image], capture_output=True, text=True, check=False)
        assert "Device has active dirty bitmaps" in refused.stderr
        subprocess.run(["qemu-img", "bitmap", "--remove", image, checkpoint], check=True)
        subprocess.run([*revert, image], check=True)
    libvirt.virsh("start", "web01", "--paused")
    made = live()
    assert not any(disk["is_incremental"] for disk in made["disks"])
    assert_same_as_now(coldrise, made["address"], running, tmp_path)


def test_two_repositories_have_their_own_checkpoints(coldrise, other, domain, live):
    running = domain()
    first = [live(), live(program=other)]
    assert len(running.checkpoints()) == 2
    running.write("vda", "write -P 1 0 64k")
    for program, base in ((coldrise, first[0]), (other, first[1])):
        made = live(program=program)
        assert made["disks"][0]["base"] == base["point"] and made["disks"][0]["read_bytes"] == 65536
    assert len(running.checkpoints()) == 2


def test_the_next_job_of_another_repository_is_left_alone(coldrise, other, libvirt, domain, scratch, tmp_path):
    running = domain()
    running.write("vda", "write -P 1 0 8M")
    words = ["backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch]
    # The other backup begins in the moment in which the job of the first one has ended, and has its job until that ends.
    next_one, begun, first_has_ended = (tmp_path / name for name in ("next", "begun", "first-has-ended"))

    def wait_for(path):
        return f"while [ ! -e {path} ]; do sleep 0.05; done"

    (tmp_path / "first").mkdir()
    coldrise.more["PATH"] = path_with_virsh(
        tmp_path / "first", after=on(" domjobabort ", f"if mkdir {next_one} 2>/dev/null; then {wait_for(begun)}; fi"))
    other.more["PATH"] = path_with_virsh(
        tmp_path, before=on(" domjobabort ", wait_for(first_has_ended)), after=on(" backup-begin ", f": > {begun}"))
    first = coldrise.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(next_one.exists, "the end of the first job")
    second = other.start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, messages = first.communicate(timeout=60)
    first_has_ended.touch()
    assert first.returncode == 0, messages
    _, messages = second.communicate(timeout=60)
    assert second.returncode == 0, messages


def test_a_libvirt_job_aborted_by_others_is_reported(coldrise, libvirt, domain, scratch):
    running = domain()
    running.write("vda", "write -P 1 0 60M")
    # It reads: libvirt shows a job before that has begun, and an abort then would do nothing.
    backup = RunningBackup(coldrise, "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch,
                           "--rate", "4M")
    libvirt.virsh("domjobabort", "web01")
    code, _, message = backup.end()
    assert code not in (0, 101)
    assert "libvirt's backup job ended before everything was read" in message
    assert "scratch files" not in message


def test_iothreads_raw_disks_and_chosen_ones(coldrise, domain, live, tmp_path):
    running = domain(iothread=True)
    running.write("vda", "write -P 1 0 4M")
    made = live()
    assert "iothread" in made["instant"]["remarks"][0]
    running.write("vda", "write -P 2 1M 64k")
    made = live()
    assert made["disks"][0]["read_bytes"] == 65536
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    running = domain("raw", image_format="raw")
    running.write("vdb", "write -P 4 0 1M")
    for _ in range(2):
        made = live("system=vdb", machine="db01", source="libvirt:raw")
        assert [disk["disk"] for disk in made["disks"]] == ["system"] and not made["disks"][0]["is_incremental"]
        assert made["instant"]["remarks"] == ["disk vda of the machine is not backed up",
                                              "system: only qcow2 images keep checkpoints: everything is read"]
    assert running.checkpoints() == []


def test_refusals_contain_advice(libvirt, domain, refused, scratch, tmp_path):
    assert "no domain web01" in refused()
    running = domain(persistent=True)
    assert "there twice" in refused("a=vda", "b=vda") and "there twice" in refused("a=vda", "a=vdb")
    assert "no writable disk 'sdx'; it has: vda, vdb" in refused("x=sdx")
    assert "not frozen" not in refused("--agent", "x", "--quiesce")
    # The job of another program is left alone.
    begin = tmp_path / "backup.xml"
    other = running.images["vda"].with_name("other")
    begin.write_text(f"<domainbackup mode='pull'><server transport='unix' socket='{other}'/></domainbackup>")
    libvirt.virsh("backup-begin", "web01", str(begin))
    assert "another job" in refused()
    assert running.has_job()
    libvirt.virsh("domjobabort", "web01")
    # The request is answered before the job has ended.
    wait_until(lambda: not running.has_job(), "the end of the job")
    # Too little space is seen before the start.
    fill = libvirt.small / "fill"
    fill.write_bytes(bytes(50 * MIB))
    assert "--scratch DIR" in refused(folder=libvirt.small) and list(libvirt.small.iterdir()) == [fill]
    fill.unlink()
    assert running.checkpoints() == []


def test_a_full_file_system_does_not_stop_the_guest(libvirt, domain, coldrise, tmp_path):
    """The scratch file has all space that it can need."""
    small = libvirt.small
    running = domain()
    running.write("vda", "write -P 1 0 64M")
    coldrise.runs = tmp_path / "runs"
    with killed_at(tmp_path, "after", "backup-begin"):
        coldrise.run("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", small)
    assert running.has_job()
    assert "a backup of web01 was killed" in coldrise.run("doctor").stdout
    with contextlib.suppress(OSError), open(small / "fill", "wb") as file:
        while True:
            file.write(bytes(MIB))
    running.libvirt.virsh("resume", "web01")
    running.write("vda", "write -P 2 0 64M")
    running.write("vda", "flush")
    assert running.libvirt.state("web01").startswith("running") and running.has_job()
    os.remove(small / "fill")
    running.libvirt.virsh("suspend", "web01")
    made = coldrise.json("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", small)
    assert "a killed backup left" in made["instant"]["remarks"][0]
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    assert not list(small.iterdir()) and "was killed" not in coldrise.run("doctor").stdout


def test_a_job_of_the_service_backs_up_domains_that_match(monkeypatch, libvirt, domain, coldrise, request):
    monkeypatch.setenv("LIBVIRT_DEFAULT_URI", libvirt.uri)
    service = request.getfixturevalue("service")
    domain("web01")
    domain("web02", persistent=True).end()
    domain("db01")
    service.post("jobs", {"name": "running", "kind": "backup", "machines": ["web*"], "from": "libvirt"})
    for number in (1, 2):
        service.post("jobs/running/start", {}, expected=(202,))
        wait_until(lambda: not service.get("queue")["runs"], "the end of the runs")
        machines = coldrise.json("list")["machines"]
        assert [(machine["machine"], len(machine["points"])) for machine in machines] == [("web01", number), ("web02", number)]


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_every_backup_under_load_is_one_instant(request, coldrise, domain, live, tmp_path, mode):
    """`make test-libvirt-load` makes 300."""
    running = domain(sector=COUNTING_SECTOR)
    rounds = []
    for number in range(request.config.getoption("--libvirt-backups") // 2):
        made = live(*mode)
        assert made["disks"][0]["is_incremental"] == (number > 0)
        rounds.append(assert_one_instant(*restored(coldrise, made["address"], tmp_path)))
    assert len(running.checkpoints()) == 1 and not running.has_job()
    assert "<name>web01</name>" in coldrise.json("show", made["address"])["configuration"]["text"]
    assert rounds == sorted(set(rounds)), "the guest goes on"
    running.goes_on()
