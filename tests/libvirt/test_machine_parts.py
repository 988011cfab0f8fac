"""What a machine has beside its disks, from backup --from libvirt to recover: firmware variables and a TPM."""

import contextlib
import hashlib
import os
import re
import select
import shutil
import subprocess
import time

import pytest

from support import tpm
from support.cli import Coldrise
from support.counting_machine import UUID
from support.far_site import FarSite
from support.libvirt import QEMU_USER
from support.recovery import Recovery
from support.ssh_host import SshHost
from support.uefi import disk_of, domain, loader, repeating

PERMALL = f"tpm2/{tpm.PERMALL}"
# In each original TPM: another TPM does not have it.
SECRET = os.urandom(16)


@pytest.fixture
def address():
    """Tests name their points."""
    return None


@pytest.fixture
def inside(coldrise, libvirt):
    """The program sees libvirt's folders."""
    coldrise.wrap = lambda *command: [*libvirt.inside(), *command]
    return coldrise


@pytest.fixture(scope="module")
def booted(template, tmp_path_factory):
    """A folder with the disk of a machine, and its firmware's variables after the first boot: they have the boot entry."""
    folder = tmp_path_factory.mktemp("booted")
    coldrise = Coldrise.copied(template, folder / "repository")
    own, other = folder / "own", folder / "other"
    own.mkdir()
    other.mkdir()
    image = disk_of(folder, {"/EFI/own/start.efi": loader(own, "halt", "first")})
    xml = folder / "acme.xml"
    xml.write_text(domain(image), encoding="utf-8")
    coldrise.json("backup", "first", f"vda=raw:{image}", "--config", xml)
    booted = coldrise.run("boot", "first/latest", "--seal")
    assert "first login" in booted.stdout, booted.stdout + booted.stderr
    coldrise.json("restore", "first/latest", "--parts", folder / "parts")
    assert oct((folder / "parts/firmware-variables.raw").stat().st_mode & 0o777) == "0o600"
    again = coldrise.run("restore", "first/latest", "--parts", folder / "parts")
    assert again.returncode != 0 and "is there already" in again.stderr, again.stderr
    assert sorted(os.listdir(folder / "parts")) == ["configuration.xml", "firmware-variables.raw"]
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("empty")
    coldrise.json("restore", "first/latest", "--parts", folder / "link")
    assert sorted(os.listdir(folder / "empty")) == sorted(os.listdir(folder / "parts"))
    # They stay and repeat their names: the serial port forgets what nobody reads.
    disk_of(folder, {"/EFI/own/start.efi": repeating(own, "stored"), "/EFI/acme/grubx64.efi": repeating(other, "other")})
    return folder


@pytest.fixture
def acme(libvirt, booted):
    return start_acme(libvirt, booted)


def start_acme(libvirt, booted):
    """Defines and starts a machine whose boot entry lies only in its variables: a machine without them would start \\EFI\\acme\\grubx64.efi."""
    variables, disk = libvirt.images / "acme_VARS.fd", libvirt.images / "acme.raw"
    shutil.copy(booted / "parts/firmware-variables.raw", variables)
    shutil.copy(booted / "acme.raw", disk)
    os.chown(disk, QEMU_USER, QEMU_USER)
    os.chown(variables, QEMU_USER, QEMU_USER)
    xml = libvirt.images / "acme.xml"
    xml.write_text(domain(disk, variables), encoding="utf-8")
    state = libvirt.folder / "lib/swtpm" / f"{UUID}7" / "tpm2"
    state.mkdir(parents=True)
    tpm.store(state, SECRET)
    libvirt.virsh("define", xml)
    libvirt.virsh("start", "acme")
    assert says(libvirt, "acme") == "stored"
    return variables


def says(libvirt, name):
    """The word that the loader writes to the serial port."""
    with open(libvirt.virsh("ttyconsole", name), "rb", buffering=0) as port:
        said, until = b"", time.monotonic() + 120
        while not re.search(b"[a-z] login: ", said) and time.monotonic() < until:
            if select.select([port], [], [], 1)[0]:
                said += port.read(1000)
    found = re.search(b"([a-z]+) login: ", said)
    assert found, said
    return found[1].decode()


def tpms(libvirt):
    return {path.name: path for path in (libvirt.folder / "lib/swtpm").iterdir()}


def parts_of(coldrise, address):
    """The digests of a point's parts, by kind."""
    parts = coldrise.json("list", "--parts")["parts"]
    return {part["kind"]: part["sha256"] for part in parts if part["address"] == address}


def secret_of(folder):
    """In a TPM of libvirt."""
    return tpm.stored(folder / PERMALL, len(SECRET))


def owners(folder):
    return {path.relative_to(folder).as_posix(): (path.stat().st_uid, path.stat().st_gid) for path in [folder, *folder.rglob("*")]}


def test_a_machine_comes_back_with_its_boot_entry_and_its_tpm(inside, libvirt, acme, recover, tmp_path, entered_tmp):
    scratch = libvirt.images / "scratch"
    scratch.mkdir()
    made = inside.run("backup", "acme", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    assert made.returncode == 0 and "not in this point" not in made.stderr, made.stderr
    listed = inside.json("list", "acme", "--parts")["parts"]
    assert [(part["kind"], part["format"]) for part in listed] == [("firmware-variables", "raw"), ("tpm-state", "swtpm-permall")]
    assert listed[0]["sha256"] == hashlib.sha256(acme.read_bytes()).hexdigest()
    # Its loader would take a whole processor; its TPM stays in use.
    libvirt.virsh("suspend", "acme")
    [(uuid, original)] = tpms(libvirt).items()

    # A copy in another repository has them when the original is forgotten.
    far = FarSite.repository(tmp_path, "far", is_encrypted=False)
    inside.json("copy", "--to", far.repository)
    inside.json("forget", "--all", "acme")
    inside.json("gc")
    inside.repository = far.repository
    assert inside.json("list", "acme", "--parts")["parts"][1] == listed[1]
    checked = inside.json("check-boot", "acme/latest")
    assert checked["verdict"] == "ok" and "stored login" in checked["rungs"][-1]["evidence"], checked

    # boot ends with the state that the machine left.
    booting = inside.start("boot", "acme/latest", "--name", "booted", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = ""
    while "stored login" not in said:
        line = booting.stdout.readline()
        assert line, said
        said += line
    assert "TPM" not in said, said
    booting.terminate()
    booting.communicate(timeout=60)
    kept = parts_of(inside, inside.json("unpublish", "booted")["address"])
    assert set(kept) == {"firmware-variables", "tpm-state"} and kept["tpm-state"] != listed[1]["sha256"]

    # Beside the original, which is in use.
    running = recover(listed[1]["address"], "--new-uuid", "--name", "beside")
    assert says(libvirt, "beside") == "stored"
    assert "a copy of the original's TPM" in running.said() and "the machine starts" not in running.said(), running.said()
    [own] = (libvirt.folder / "lib/qemu/nvram").iterdir()
    [beside] = [path for name, path in tpms(libvirt).items() if name != uuid]
    assert secret_of(beside) == SECRET
    inside.json("recover", "live/beside", "--undo")
    running.end()
    assert not own.exists() and not beside.exists()
    # Its point has the variables and the TPM as it left them.
    point = listed[1]["address"]
    kept = parts_of(inside, f"{point}+2")
    assert set(kept) == {"firmware-variables", "tpm-state"} and kept["tpm-state"] != listed[1]["sha256"]

    # In place of the original, which is off: its variables and its TPM are its own.
    libvirt.virsh("destroy", "acme")
    variables, state = acme.read_bytes(), (original / PERMALL).read_bytes()
    refused = inside.run("recover", "acme/latest", "--to", "libvirt", "--connect", libvirt.uri, "--socket", entered_tmp / "no",
                         "--socket-owner", QEMU_USER)
    assert refused.returncode != 0 and "the TPM of the original is on this host" in refused.stderr, refused.stderr
    assert acme.read_bytes() == variables and (original / PERMALL).read_bytes() == state
    libvirt.virsh("undefine", "acme", "--nvram", "--tpm")
    assert not acme.exists() and not original.exists()
    running = recover(listed[1]["address"])
    assert says(libvirt, "acme") == "stored"
    assert secret_of(original) == SECRET
    inside.json("recover", "live/acme-1", "--undo", "--discard")
    running.end()
    assert tpms(libvirt) == {}


def test_a_part_that_cannot_be_read_is_named(coldrise, libvirt, acme):
    scratch = libvirt.images / "scratch"
    scratch.mkdir()
    # Without libvirt's folders: as without the right to read them.
    coldrise.wrap = lambda *command: command
    made = coldrise.run("backup", "acme", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    assert made.returncode == 0 and "not in this point: the machine's state of the TPM" in made.stderr, made.stderr
    assert [part["kind"] for part in coldrise.json("list", "acme", "--parts")["parts"]] == ["firmware-variables"]
    shown = coldrise.run("show", "acme/latest").stdout
    assert "firmware-variables" in shown and "tpm" not in shown
    os.truncate(acme, 0)
    made = coldrise.run("backup", "acme", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    assert made.returncode == 0 and "firmware variables: " in made.stderr and "is empty" in made.stderr, made.stderr
    assert "firmware-variables" not in coldrise.run("show", "acme/latest").stdout


def test_a_machine_of_a_lost_host_comes_back_on_another_one(coldrise, booted, tmp_path):
    """With its boot entry and its TPM, and nothing of the first host. It moves there, and starts again as any machine of that host."""
    with contextlib.closing(SshHost()) as hv1, contextlib.closing(SshHost()) as hv2:
        hv1.add_to(coldrise, "hv1")
        hv2.add_to(coldrise, "hv2")
        start_acme(hv1.libvirt, booted)
        made = coldrise.run("backup", "acme", "--from", "libvirt", "--on", "hv1,hv2")
        assert made.returncode == 0 and "not in this point" not in made.stderr, made.stderr
        [original] = tpms(hv1.libvirt).values()
        assert secret_of(original) == SECRET
        owned = owners(original)
        hv1.libvirt.clear()
        hv1.stop()
        # Its check needs none of SSH's forwarding.
        hv2.stop()
        hv2.start("DisableForwarding yes")
        checked = coldrise.json("check-boot", "acme/latest", "--on", "hv2")
        assert checked["verdict"] == "ok" and "stored login" in checked["rungs"][-1]["evidence"], checked
        hv2.stop()
        hv2.start()
        variables = hv2.libvirt.folder / "lib/qemu/nvram"
        running = Recovery(coldrise, tmp_path / "recover.err", "acme/latest", "--on", "hv2")
        assert says(hv2.libvirt, "acme") == "stored", running.said()
        [own] = tpms(hv2.libvirt).values()
        assert secret_of(own) == SECRET
        moved = coldrise.json("move", "live/acme-1", hv2.libvirt.images)
        assert running.end()["state"] == "moved"
        assert set(parts_of(coldrise, moved["address"])) == {"firmware-variables", "tpm-state"}
        coldrise.json("unpublish", "acme-1")
        kept = re.sub(r"(<nvram[^>]*?) template='[^']*'", r"\1", hv2.libvirt.virsh("dumpxml", "acme"))
        (tmp_path / "kept.xml").write_text(kept, encoding="utf-8")
        hv2.libvirt.virsh("define", tmp_path / "kept.xml")
        [file] = variables.iterdir()
        assert (owners(own), file.stat().st_uid) == (owned, QEMU_USER)
        hv2.libvirt.virsh("destroy", "acme")
        hv2.libvirt.virsh("start", "acme")
        assert says(hv2.libvirt, "acme") == "stored" and secret_of(own) == SECRET
        hv2.libvirt.virsh("destroy", "acme")
        hv2.libvirt.virsh("undefine", "acme", "--nvram", "--tpm")

        running = Recovery(coldrise, tmp_path / "recover.err", "acme/latest", "--on", "hv2")
        assert list(variables.iterdir()) and secret_of(own) == SECRET
        coldrise.json("recover", f"live/{running.event['session']}", "--undo", "--discard")
        assert running.end()["state"] == "off"
        assert tpms(hv2.libvirt) == {} and not list(variables.iterdir())

        # Its host is away at its end: what stays there is removed later, but not what may be another machine's.
        running = Recovery(coldrise, tmp_path / "recover.err", "acme/latest", "--on", "hv2")
        session = running.event["session"]
        running.kill()
        hv2.stop()
        coldrise.json("recover", f"live/{session}", "--undo", "--without-server", "--discard")
        hv2.start()
        assert f"acme of the ended session {session} was left on host hv2" in coldrise.run("doctor").stdout
        [file] = variables.iterdir()
        hv2.libvirt.virsh("destroy", "acme")
        kept = file.rename(tmp_path / "kept")
        assert "stays: it may be another machine's" in coldrise.run("host", "check", "hv2").stdout
        assert (own / PERMALL).exists()
        shutil.copy(kept, file)
        checked = coldrise.run("host", "check", "hv2")
        assert checked.returncode == 0 and f"removed acme of the ended session {session}" in checked.stderr, checked.stderr
        assert tpms(hv2.libvirt) == {} and not file.exists()
        assert "was left on" not in coldrise.run("doctor").stdout
