"""coldrise boot: a machine of one sector, which writes to its disk and powers off."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from support.cli import PROGRAM, Coldrise
from support.nbdserver import wait_until

MIB = 1 << 20

# 16-bit code at 0x7c00:
#   xor ax,ax; mov ds,ax; mov es,ax; mov ss,ax; mov sp,0x7c00; push dx
#   mov si,message; mov dx,0x3f8
#   next: lodsb; test al,al; jz write; out dx,al; jmp next
#   write: pop dx; mov ax,0x0301; mov bx,0x7c00; mov cx,0x0002; mov dh,0; int 0x13
#   mov ax,0x5301; xor bx,bx; int 0x15                  connect to power management
#   mov ax,0x530e; xor bx,bx; mov cx,0x0102; int 0x15   version 1.2
#   mov ax,0x5307; mov bx,1; mov cx,3; int 0x15         everything off
#   halt: hlt; jmp halt
#   message: "booted\r\n\0"
CODE = bytes.fromhex(
    "31c08ed88ec08ed0bc007c52be477cbaf803ac84c07403eeebf85ab80103bb007cb90200b600cd13"
    "b8015331dbcd15b80e5331dbb90201cd15b80753bb0100b90300cd15f4ebfd626f6f7465640d0a00"
)
SECTOR = CODE.ljust(510, b"\0") + b"\x55\xaa"


@pytest.fixture
def machine(coldrise, tmp_path):
    """The address of a point whose machine says "booted", writes its own sector to
    the second one and powers off."""
    path = tmp_path / "boot.raw"
    path.write_bytes(SECTOR.ljust(MIB, b"\0"))
    return coldrise.backup("web01", vda=path)


def second_sector(coldrise, address, tmp_path):
    target = tmp_path / "second.raw"
    coldrise.json("restore", f"{address}/vda", target, "--force")
    return target.read_bytes()[512:1024]


@pytest.mark.parametrize("protocol", ["nbd", "nfs"])
def test_boot_and_seal(coldrise, machine, tmp_path, protocol):
    done = coldrise.run("--json", "boot", machine, "--over", protocol, "--name", "trial", "--seal",
                        "--memory", "64M")
    assert done.returncode == 0, done.stderr
    assert "booted" in done.stdout
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert last["session"] == "trial" and last["address"] == f"{machine}+1"
    assert second_sector(coldrise, last["address"], tmp_path) == SECTOR
    assert second_sector(coldrise, machine, tmp_path) == bytes(512)
    assert coldrise.json("sessions") == {"sessions": []}


def test_boot_keeps_the_session(coldrise, machine, tmp_path):
    done = coldrise.run("boot", "web01/latest", "--memory", "64M")
    assert done.returncode == 0, done.stderr
    for word in ("coldrise boot live/web01-1", "coldrise unpublish web01-1", "--discard"):
        assert word in done.stdout
    assert second_sector(coldrise, "live/web01-1", tmp_path) == SECTOR
    again = coldrise.run("--json", "boot", "live/web01-1", "--memory", "64M", "--discard")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.strip().splitlines()[-1])["discarded"]
    assert coldrise.json("sessions") == {"sessions": []}
    assert len(coldrise.json("list")["machines"][0]["points"]) == 1


@pytest.mark.parametrize("protocol", ["nbd", "nfs"])
@pytest.mark.parametrize("bus", ["virtio", "scsi", "sata", "ide"])
def test_every_bus_boots(coldrise, machine, bus, protocol):
    done = coldrise.run("boot", machine, "--over", protocol, "--disk-bus", bus, "--memory", "64M",
                        "--discard")
    assert done.returncode == 0, done.stderr
    assert "booted" in done.stdout


@pytest.mark.parametrize("name, text", [
    ("web01.json", '{"cpus": 3, "memory_mib": 96, "disk_bus": "sata"}'),
    ("web01.xml", "<domain><memory unit='MiB'>96</memory><vcpu>3</vcpu><devices><disk>"
                  "<target bus='sata'/></disk></devices></domain>"),
    ("web01.vmx", 'memsize = "96"\nnumvcpus = "3"\nscsi0:0.present = "TRUE"\n'),
])
def test_the_stored_configuration_is_used(coldrise, tmp_path, name, text):
    disk = tmp_path / "boot.raw"
    disk.write_bytes(SECTOR.ljust(MIB, b"\0"))
    configuration = tmp_path / name
    configuration.write_text(text, encoding="utf-8")
    address = coldrise.json("backup", "web01", f"vda={disk}", "--config", configuration)["address"]
    done = coldrise.run("boot", address, "--discard")
    assert done.returncode == 0 and "booted" in done.stdout, done.stderr
    assert "3 processors, 96 MiB" in done.stderr
    other = coldrise.run("boot", address, "--discard", "--memory", "64M", "--cpus", "1")
    assert "1 processor, 64 MiB" in other.stderr


def test_a_broken_configuration_does_not_keep_a_machine_from_booting(coldrise, tmp_path):
    disk = tmp_path / "boot.raw"
    disk.write_bytes(SECTOR.ljust(MIB, b"\0"))
    configuration = tmp_path / "web01.xml"
    configuration.write_text("<domain><memory>", encoding="utf-8")
    address = coldrise.json("backup", "web01", f"vda={disk}", "--config", configuration)["address"]
    done = coldrise.run("boot", address, "--discard", "--memory", "64M")
    assert done.returncode == 0 and "booted" in done.stdout
    assert "warning" in done.stderr


def test_a_boot_without_qemu_publishes_nothing(coldrise, machine, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    os.symlink("/bin/sh", tools / "sh")
    environment = coldrise.environment() | {"PATH": str(tools)}
    done = subprocess.run([PROGRAM, "boot", machine], env=environment, capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 1 and "qemu-system-x86_64" in done.stderr
    assert coldrise.json("sessions") == {"sessions": []}


@pytest.fixture
def idle_machine(coldrise, tmp_path):
    """The address of a point whose machine says "!" and then idles."""
    path = tmp_path / "idle.raw"
    # mov dx,0x3f8; mov al,'!'; out dx,al; hlt; jmp to it
    code = bytes.fromhex("baf803b021eef4ebfd")
    path.write_bytes(code.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
    return coldrise.backup("web01", vda=path)


def start(coldrise, address, protocol):
    """A machine that runs: the process of its boot."""
    process = coldrise.start("boot", address, "--over", protocol, "--memory", "64M",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == "!", process.communicate()
    return process


def descendants(process):
    """Processes that a process has started, and theirs: what each runs, by its id."""
    found, children = {}, []
    # A thread or a process may end during the look-up: the others still count.
    ended = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    with ended:
        # QEMU is the child of a thread of its own.
        for thread in list(pathlib.Path(f"/proc/{process}/task").iterdir()):
            with ended:
                children += (thread / "children").read_text(encoding="ascii").split()
    for child in children:
        with ended:
            found[child] = os.readlink(f"/proc/{child}/exe")
            found |= descendants(child)
    return found


def is_running(process, program):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.readlink(f"/proc/{process}/exe") == program
    return False


@pytest.mark.parametrize("protocol", ["nbd", "nfs"])
def test_an_interrupted_machine_leaves_its_session(coldrise, idle_machine, protocol):
    process = start(coldrise, idle_machine, protocol)
    started = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "session web01-1 is kept" in messages
    (session,) = coldrise.json("sessions")["sessions"]
    assert not session["is_served"]
    assert not any(is_running(*child) for child in started.items())


@pytest.mark.parametrize("protocol, servers", [("nbd", ["nbdkit"]), ("nfs", ["ganesha", "rpcbind"])])
def test_a_killed_boot_leaves_no_processes(coldrise, idle_machine, protocol, servers):
    process = start(coldrise, idle_machine, protocol)
    started = descendants(process.pid)
    for server in servers:
        assert any(server in program for program in started.values()), started
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(is_running(*child) for child in started.items()), "their end")


@pytest.mark.parametrize("protocol, server", [("nbd", "nbdkit"), ("nfs", "ganesha")])
def test_a_crash_of_the_server_does_not_end_the_machine(coldrise, idle_machine, protocol, server):
    process = start(coldrise, idle_machine, protocol)

    def running(program):
        return {child for child, path in descendants(process.pid).items() if program in path}

    machine, before = running("qemu"), running(server)
    assert len(machine) == 1
    (first,) = before
    os.kill(int(first), signal.SIGKILL)
    wait_until(lambda: running(server) - before, "another server")
    assert running("qemu") == machine
    process.terminate()
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 130 and "is started again" in messages


@pytest.mark.parametrize("protocol", ["nbd", "nfs"])
def test_a_boot_is_one_run_and_is_cancelled_as_ctrl_c_does(coldrise, idle_machine, tmp_path, protocol):
    """Also over NFS, where the program restarts itself in a network of its own."""
    recorded = Coldrise(coldrise.repository, coldrise.passphrase_file, runs=tmp_path / "runs")
    process = start(recorded, idle_machine, protocol)
    [run] = recorded.json("runs")["runs"]
    assert run["state"] == "running" and run["plan"]["machine"] == "web01"
    assert recorded.json("runs", "cancel", run["id"])["state"] == "cancelled"
    _output, messages = process.communicate(timeout=60)
    assert process.returncode == 130 and "is kept" in messages
    assert len(recorded.json("runs")["runs"]) == 1


def test_machines_over_nfs_do_not_interfere(coldrise, idle_machine, nfs):
    """Each finds its own server, although another one serves the network in which they start."""
    server = nfs()
    inside = server.network.command(PROGRAM, "boot", idle_machine, "--over", "nfs",
                                    "--memory", "64M")
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(inside, env=coldrise.environment(), **pipes) for _ in range(2)]
    try:
        for process in running:
            wait_until(lambda: any("qemu" in name for name in descendants(process.pid).values()),
                       "QEMU")
        taken = subprocess.run([*inside, "--network", "user"], env=coldrise.environment(),
                               capture_output=True, timeout=60, check=False)
        assert taken.returncode == 11, taken.stderr
    finally:
        for process in running:
            process.terminate()
            process.communicate(timeout=60)
    assert [process.returncode for process in running] == [130, 130]
    with server.connect() as client:
        live = client.names(client.lookup(server.root(), "live"))
    assert live == ["web01-1", "web01-2", "web01-3"]


def test_missing_requirements_of_boot_over_nfs_are_named(coldrise, machine, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    packages = {"ip": "iproute2", "ganesha.nfsd": "nfs-ganesha", "rpcbind": "rpcbind",
                "qemu-system-x86_64": "qemu-system-x86"}
    for name in ("unshare", "sh", "mount", "cp", "mkdir", "true", *packages):
        if name in packages:
            said = failed_boot(coldrise, machine, tools)
            assert f"apt install {packages[name]})" in said
        (tools / name).symlink_to(shutil.which(name))
    assert coldrise.json("sessions") == {"sessions": []}


def failed_boot(coldrise, machine, tools):
    """The message if only these tools exist."""
    done = subprocess.run([PROGRAM, "boot", machine, "--over", "nfs"], capture_output=True,
                          env=coldrise.environment() | {"PATH": str(tools)}, text=True, timeout=60,
                          check=False)
    assert done.returncode == 1
    return done.stderr
