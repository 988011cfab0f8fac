"""A machine that counts in its second sector at each tick of its timer, 18 times a second, stored with the XML of another host."""

import os

from support.running import BUSY_SECTOR

MIB = 1 << 20
UUID = "5d7a5f44-1d7e-4a1e-9a63-00000000000"
# 16-bit code: at each tick, count in the disk's second sector.
#   xor ax,ax; mov ds,ax; mov es,ax; mov [0x500],dl
#   next: inc dword [0x1000]; mov ax,0x0301; mov bx,0x1000; mov cx,2; mov dh,0; mov dl,[0x500]; int 0x13; hlt; jmp next
CODE = bytes.fromhex("31c08ed88ec088160005" "66ff060010" "b80103" "bb0010" "b90200" "b600" "8a160005"
                     "cd13" "f4" "ebe7")  # fmt: skip

XML = f"""<domain type='kvm'><name>web01</name><uuid>{UUID}1</uuid>
<memory unit='MiB'>32</memory><vcpu>1</vcpu><os><type arch='x86_64' machine='pc'>hvm</type></os>
<devices><emulator>/bin/false</emulator>
<disk type='file' device='disk'><source file='/lost.qcow2'/><target dev='vda' bus='virtio'/></disk>
<disk type='file' device='cdrom'><source file='/lost.iso'/><target dev='hdc' bus='ide'/></disk>
<hostdev mode='subsystem' type='pci'><source><address bus='6' slot='1' function='0'/></source></hostdev>
<interface type='bridge'><source bridge='lost0'/><model type='virtio'/></interface>
</devices></domain>"""


def store(coldrise, folder, random_mib=4):
    """Its backup; returns the address. A copy with a limited rate takes time for what is random only."""
    disk = folder / "boot.raw"
    content = CODE.ljust(510, b"\0") + b"\x55\xaa" + bytes(4 * MIB - 512) + os.urandom(random_mib * MIB)
    disk.write_bytes(content + bytes((28 - random_mib) * MIB))
    configuration = folder / "web01.xml"
    configuration.write_text(XML, encoding="utf-8")
    return coldrise.json("backup", "web01", f"vda=raw:{disk}", "--config", configuration)["address"]


def store_busy(coldrise, folder):
    """A machine that counts on two disks as fast as it can (support.running); returns the address."""
    one = XML[XML.index("<disk type='file' device='disk'>"):XML.index("<disk type='file' device='cdrom'>")]
    # The firmware shows its programs only disks that have a place in the boot order.
    both = "".join(one.replace("vda", disk).replace("</disk>", f"<boot order='{number}'/></disk>")
                   for number, disk in enumerate(("vda", "vdb"), 1))
    configuration = folder / "web01.xml"
    configuration.write_text(XML.replace(one, both), encoding="utf-8")
    disks = []
    for name in ("vda", "vdb"):
        disk = folder / f"busy-{name}.raw"
        disk.write_bytes(BUSY_SECTOR.ljust(510, b"\0") + b"\x55\xaa" + bytes(16 * MIB - 512))
        disks.append(f"{name}=raw:{disk}")
    return coldrise.json("backup", "web01", *disks, "--config", configuration)["address"]


def count(coldrise, address, folder):
    """How far it has counted on a point or session."""
    path = folder / "second.raw"
    coldrise.json("restore", f"{address}/vda", path, "--force")
    return int.from_bytes(path.read_bytes()[512:516], "little")
