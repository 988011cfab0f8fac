"""Whole machines in OVF: backed up from .ova and .ovf files of several programs, and written as an OVA."""

import hashlib
import io
import os
import random
import tarfile

import pytest

from support.sources import convert, is_same_disk, tool

MIB = 1 << 20
SIZES = {"vda": 4 * MIB, "vdb": 3 * MIB + 512}
VMDK = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"
# As VMware and VirtualBox write it, with the second file as the first disk.
OVF = """<?xml version="1.0" encoding="UTF-8"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"
 xmlns:vmw="http://www.vmware.com/schema/ovf">
<References>
<File ovf:href="acme-disk2.vmdk" ovf:id="file2" ovf:size="{vdb}"/><File ovf:href="acme-disk1.vmdk" ovf:id="file1"/>
</References>
<DiskSection><Info/>
<Disk ovf:capacity="3146240" ovf:diskId="vmdisk2" ovf:fileRef="file2" ovf:format="{vmdk}"/>
<Disk ovf:capacity="4" ovf:capacityAllocationUnits="byte * 2^20" ovf:diskId="vmdisk1" ovf:fileRef="file1"
 ovf:format="{vmdk}"/>
</DiskSection>
<NetworkSection><Info/><Network ovf:name="LAN"/></NetworkSection>
<VirtualSystem ovf:id="acme"><Info/><Name>Acme ERP 1</Name>
<OperatingSystemSection ovf:id="96" vmw:osType="debian10_64Guest"><Info/></OperatingSystemSection>
<VirtualHardwareSection><Info/>
<Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType>
<rasd:VirtualQuantity>3</rasd:VirtualQuantity></Item>
<Item><rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:InstanceID>2</rasd:InstanceID>
<rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>1536</rasd:VirtualQuantity></Item>
<Item><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceSubType>lsilogicsas</rasd:ResourceSubType>
<rasd:ResourceType>6</rasd:ResourceType></Item>
<Item><rasd:AddressOnParent>0</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/vmdisk1</rasd:HostResource>
<rasd:InstanceID>4</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType></Item>
<Item><rasd:AddressOnParent>1</rasd:AddressOnParent><rasd:HostResource>ovf:/disk/vmdisk2</rasd:HostResource>
<rasd:InstanceID>5</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType></Item>
<Item><rasd:Connection>LAN</rasd:Connection><rasd:InstanceID>6</rasd:InstanceID>
<rasd:ResourceSubType>VmxNet3</rasd:ResourceSubType><rasd:ResourceType>10</rasd:ResourceType></Item>
<vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>
</VirtualHardwareSection></VirtualSystem></Envelope>
"""


def save(folder, size, stored):
    """A sparse raw file of these parts."""
    path = folder / "disk.raw"
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, length in stored:
            file.seek(offset)
            file.write(random.Random(size + offset).randbytes(length))
    return path


class Machine:
    """The files of an exported machine."""

    def __init__(self, folder):
        self.folder = folder
        self.raws = {}
        self.files = {}
        for number, (disk, size) in enumerate(SIZES.items(), 1):
            (folder / disk).mkdir()
            self.raws[disk] = save(folder / disk, size, [(0, 65536), (2 * MIB, 70000)])
            vmdk = convert(self.raws[disk], folder / f"acme-disk{number}.vmdk", "vmdk", "subformat=streamOptimized")
            self.files[vmdk.name] = vmdk.read_bytes()
        text = OVF.format(vmdk=VMDK, vdb=len(self.files["acme-disk2.vmdk"]))
        self.files = {"acme.ovf": text.encode(), "acme.mf": b"", **self.files}
        self.sign()

    def sign(self, algorithm="sha256"):
        self.files["acme.mf"] = "".join(
            f"{algorithm.upper()}({name})= {hashlib.new(algorithm, content).hexdigest()}\n"
            for name, content in self.files.items() if name != "acme.mf").encode()

    def ova(self, path, tar_format=tarfile.USTAR_FORMAT, doubled=()):
        with tarfile.open(path, "w", format=tar_format) as archive:
            for name, content in [*self.files.items(), *((name, self.files[name]) for name in doubled)]:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                if tar_format == tarfile.PAX_FORMAT:
                    member.pax_headers = {"size": str(len(content)), "mtime": "1.5", "comment": "x" * 600}
                archive.addfile(member, io.BytesIO(content))
        return path


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "export").mkdir()
    return Machine(tmp_path / "export")


def check_content(coldrise, address, machine, folder):
    for disk, raw in machine.raws.items():
        out = folder / f"{disk}.out"
        coldrise.json("restore", f"{address}/{disk}", out, "--format", "raw", "--force")
        assert out.read_bytes() == raw.read_bytes(), disk


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("algorithm", ["sha1", "sha512"])
def test_an_ova_is_a_machine(coldrise, machine, tmp_path, tar_format, algorithm):
    machine.sign(algorithm)
    ova = machine.ova(tmp_path / "acme.ova", tar_format)
    made = coldrise.json("backup", "acme", ova)
    assert [disk["disk"] for disk in made["disks"]] == ["vda", "vdb"]
    assert made["display_name"] == "Acme ERP 1"
    shown = coldrise.json("show", made["address"])
    assert shown["configuration"] == {"format": "ovf", "text": machine.files["acme.ovf"].decode()}
    assert [disk["size_bytes"] for disk in shown["disks"]] == list(SIZES.values())
    check_content(coldrise, made["address"], machine, tmp_path)
    # A later export of the same machine stores only what has changed.
    machine.raws["vda"].write_bytes(b"new" + machine.raws["vda"].read_bytes()[3:])
    convert(machine.raws["vda"], machine.folder / "new.vmdk", "vmdk", "subformat=streamOptimized")
    machine.files["acme-disk1.vmdk"] = (machine.folder / "new.vmdk").read_bytes()
    machine.sign()
    again = coldrise.json("backup", "acme", machine.ova(ova, tar_format))
    assert [disk["new_chunks"] for disk in again["disks"]] == [1, 0]
    assert all(f"acme/{disk['base']}" == made["address"] for disk in again["disks"])
    check_content(coldrise, again["address"], machine, tmp_path)


def test_an_ovf_and_its_files(coldrise, machine, tmp_path):
    # Rounded to its unit, as some programs do.
    replaced("acme.ovf", b'ovf:capacity="3146240"', b'ovf:capacity="4" ovf:capacityAllocationUnits="byte * 2^20"')(machine)
    for name, content in machine.files.items():
        (machine.folder / name).write_bytes(content)
    (machine.folder / "acme.cert").write_text("-----BEGIN CERTIFICATE-----\n", encoding="utf-8")
    done = coldrise.run("backup", "acme", machine.folder / "acme.ovf")
    assert done.returncode == 0 and "the signature was not verified" in done.stderr
    check_content(coldrise, "acme/latest", machine, tmp_path)
    (machine.folder / "acme.mf").unlink()
    done = coldrise.run("backup", "acme", machine.folder / "acme.ovf")
    assert done.returncode == 0 and "no manifest" in done.stderr
    # A link leads out of the folder.
    (machine.folder / "acme-disk1.vmdk").rename(tmp_path / "elsewhere.vmdk")
    (machine.folder / "acme-disk1.vmdk").symlink_to(tmp_path / "elsewhere.vmdk")
    done = coldrise.run("backup", "acme", machine.folder / "acme.ovf")
    assert done.returncode == 2 and "not a plain file" in done.stderr


def replaced(name, old, new):
    def change(machine):
        assert old in machine.files[name]
        machine.files[name] = machine.files[name].replace(old, new)
        machine.sign()
    return change


def without(name):
    return lambda machine: machine.files.pop(name)


def damaged(machine):
    content = bytearray(machine.files["acme-disk2.vmdk"])
    content[-2000] ^= 1
    machine.files["acme-disk2.vmdk"] = bytes(content)


def flat(machine):
    """A text that names another file, under the name of a sparse VMDK."""
    machine.files["acme-disk1.vmdk"] = b'# Disk DescriptorFile\nversion=1\nRW 8192 FLAT "/etc/passwd" 0\n'
    machine.sign()


def directory_outside(machine):
    content = bytearray(machine.files["acme-disk1.vmdk"])
    content[56:64] = (1 << 40).to_bytes(8, "little")
    machine.files["acme-disk1.vmdk"] = bytes(content)
    machine.sign()


BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]><Envelope'
REFUSED = {
    "digest": (damaged, "its digest differs"),
    "missing file": (without("acme-disk2.vmdk"), "acme-disk2.vmdk"),
    "no descriptor": (without("acme.ovf"), "no .ovf"),
    "not referenced": (replaced("acme.ovf", b'ovf:id="file1"', b'ovf:id="other"'), "not among its references"),
    "outside": (replaced("acme.ovf", b'"acme-disk1.vmdk"', b'"../acme-disk1.vmdk"'), "only files beside"),
    "url": (replaced("acme.ovf", b'"acme-disk1.vmdk"', b'"http://acme.example/1.vmdk"'), "only files beside"),
    "encoded": (replaced("acme.ovf", b'"acme-disk1.vmdk"', b'"..%2facme-disk1.vmdk"'), "is missing"),
    "gzip": (replaced("acme.ovf", b'ovf:id="file1"', b'ovf:id="file1" ovf:compression="gzip"'), "compressed as a whole"),
    "chunks": (replaced("acme.ovf", b'ovf:id="file1"', b'ovf:id="file1" ovf:chunkSize="9"'), "in pieces"),
    "length": (replaced("acme.ovf", b'ovf:id="file2" ovf:size="', b'ovf:id="file2" ovf:size="1'), "as the descriptor states"),
    "capacity": (replaced("acme.ovf", b'"3146240"', b'"3145728"'), "3146240 bytes, not 3145728"),
    "rounded": (replaced("acme.ovf", b'ovf:capacity="4"', b'ovf:capacity="5"'), "4194304 bytes, not 5242880"),
    "capacity of nothing": (replaced("acme.ovf", b'ovf:capacity="4"', b'ovf:capacity="-1"'), "is not a size"),
    "bomb": (replaced("acme.ovf", b"<Envelope", BOMB), "XML"),
    "flat": (flat, "not a sparse VMDK"),
    "directory": (directory_outside, "truncated or damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_stored_of_a_wrong_ova(coldrise, machine, tmp_path, name):
    change, words = REFUSED[name]
    change(machine)
    done = coldrise.run("backup", "acme", machine.ova(tmp_path / "acme.ova"))
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert coldrise.json("list")["machines"] == []


def test_wrong_archives(coldrise, machine, tmp_path):
    ova = machine.ova(tmp_path / "acme.ova")
    content = ova.read_bytes()
    huge = bytearray(content)
    # The size of the first member, in base 256: 2^62 bytes.
    huge[124:136] = bytes([0x80, 0, 0, 0, 0x40]) + bytes(7)
    huge[148:156] = b" " * 8
    huge[148:156] = b"%06o\0 " % sum(huge[:512])
    for wrong, words in [
        (content[:len(content) // 2], "truncated"),
        (bytes(huge), "truncated"),
        (content[:148] + b"0000000\0" + content[156:], "not a tar archive"),
        (machine.files["acme.ovf"], "not a tar archive"),
        (b"", "no .ovf"),
    ]:
        ova.write_bytes(wrong)
        done = coldrise.run("backup", "acme", ova)
        assert done.returncode in (1, 2) and words in done.stderr, (words, done.stderr)
    machine.ova(ova, doubled=["acme-disk1.vmdk"])
    assert "two members of the name 'acme-disk1.vmdk'" in coldrise.run("backup", "acme", ova).stderr
    machine.ova(ova)
    with tarfile.open(ova, "a") as archive:
        link = tarfile.TarInfo("link.vmdk")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert "'link.vmdk' is not a plain file" in coldrise.run("backup", "acme", ova).stderr
    machine.ova(ova)
    done = coldrise.run("backup", "acme", f"vda={ova}")
    assert done.returncode == 2 and "name it without a disk" in done.stderr
    assert coldrise.json("list")["machines"] == []


def test_a_machine_comes_back_through_an_ova(coldrise, machine, tmp_path):
    first = coldrise.json("backup", "acme", machine.ova(tmp_path / "acme.ova"))["address"]
    out = tmp_path / "out.ova"
    done = coldrise.json("restore", "acme/latest", out)
    assert done["format"] == "ova" and done["size_bytes"] == sum(SIZES.values())
    with tarfile.open(out) as archive:
        names = archive.getnames()
        assert names == ["acme.ovf", "acme.mf", "acme-disk1.vmdk", "acme-disk2.vmdk"]
        archive.extractall(tmp_path / "out")
    assert tool("tar", "tf", out).split() == names
    stated = (tmp_path / "out/acme.mf").read_text(encoding="utf-8").splitlines()
    assert stated == [f"SHA256({name})= {hashlib.sha256((tmp_path / 'out' / name).read_bytes()).hexdigest()}"
                      for name in ["acme.ovf", "acme-disk1.vmdk", "acme-disk2.vmdk"]]
    for number, raw in enumerate(machine.raws.values(), 1):
        vmdk = tmp_path / f"out/acme-disk{number}.vmdk"
        assert is_same_disk(raw, "raw", vmdk, "vmdk")
        tool("qemu-img", "check", "-f", "vmdk", vmdk)
    text = (tmp_path / "out/acme.ovf").read_text(encoding="utf-8")
    for kept in ['vmw:value="efi"', "<Name>Acme ERP 1</Name>", 'vmw:osType="debian10_64Guest"',
                 "<rasd:ResourceSubType>lsilogicsas<", "<rasd:ResourceSubType>VmxNet3<", '<Network ovf:name="LAN"/>',
                 "<rasd:VirtualQuantity>3<", "<rasd:VirtualQuantity>1536<"]:  # fmt: skip
        assert kept in text, kept
    again = coldrise.json("backup", "copy", out)
    assert again["display_name"] == "Acme ERP 1"
    for disk in SIZES:
        assert coldrise.json("diff", f"{first}/{disk}", f"{again['address']}/{disk}")["is_equal"]
    # The same point always gives the same bytes.
    content = out.read_bytes()
    refused = coldrise.run("restore", "acme/latest", out)
    assert refused.returncode == 1 and "--force" in refused.stderr
    coldrise.json("restore", "acme/latest", out, "--force")
    assert out.read_bytes() == content
    # One disk, of a session, by the format's word.
    coldrise.publish(first, "trial")
    coldrise.json("restore", "live/trial/vdb", tmp_path / "one", "--format", "ova")
    assert tool("tar", "tf", tmp_path / "one").split() == ["trial.ovf", "trial.mf", "trial-disk1.vmdk"]
    assert "tar xf" in coldrise.run("restore", "acme/latest", tmp_path / "acme.ovf").stderr


def test_a_full_target_is_left_clean(coldrise, tmp_path):
    raw = save(tmp_path, 32 * MIB, [(0, 32 * MIB)])
    address = coldrise.backup("acme", vda=raw)
    small = tmp_path / "small"
    small.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small)
    try:
        done = coldrise.run("restore", address, small / "acme.ova")
        assert done.returncode == 1 and "No space" in done.stderr
        assert os.listdir(small) == []
    finally:
        tool("umount", small)
