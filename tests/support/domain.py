"""A domain of libvirt whose guest counts on two disks, see support.running."""

import os
import subprocess

from .libvirt import QEMU_USER
from .nbdserver import wait_until
from .running import DISKS, MIB

SIZE = 64 * MIB


class Domain:
    """Transient, with a guest of one sector; without one it is paused before its first instruction."""

    def __init__(self, libvirt, name, *, sector=None, image_format="qcow2", iothread=False, persistent=False, title=""):
        self.libvirt, self.name, self.format = libvirt, name, image_format
        self.counting = sector is not None
        folder = libvirt.images / name
        folder.mkdir(exist_ok=True)
        self.images = {disk: folder / f"{disk}.{image_format}" for disk in DISKS}
        for image in self.images.values():
            if not image.exists():
                subprocess.run(["qemu-img", "create", "-q", "-f", image_format, image, str(SIZE)], check=True)
        floppy = folder / "floppy"
        floppy.write_bytes((sector or b"").ljust(510, b"\0") + b"\x55\xaa" + bytes(1474560 - 512))
        for path in (folder, floppy, *self.images.values()):
            os.chown(path, QEMU_USER, QEMU_USER)
        thread = "iothread='1'" if iothread else ""
        disks = "".join(
            f"<disk type='file' device='disk'><driver name='qemu' type='{image_format}' cache='unsafe' {thread}/>"
            f"<source file='{image}'/><target dev='{disk}' bus='virtio'/><boot order='{number}'/></disk>"
            for number, (disk, image) in enumerate(self.images.items(), 2))
        xml = (f"<domain type='qemu'><name>{name}</name>{f'<title>{title}</title>' if title else ''}<memory unit='MiB'>16</memory><vcpu>1</vcpu>"
               f"{'<iothreads>1</iothreads>' if iothread else ''}"
               f"<os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features><devices>{disks}<disk type='file' "
               f"device='floppy'><source file='{floppy}'/><target dev='fda' bus='fdc'/><readonly/><boot order='1'/></disk>"
               "</devices></domain>")
        path = folder / "domain.xml"
        path.write_text(xml, encoding="utf-8")
        paused = [] if self.counting else ["--paused"]
        if persistent:
            libvirt.virsh("define", str(path))
            libvirt.virsh("start", name, *paused)
        else:
            libvirt.virsh("create", str(path), *paused)
        if self.counting:
            wait_until(lambda: self.writes() > 15, "the counting guest")

    def writes(self):
        """The number of writes to the first disk."""
        return int(self.libvirt.virsh("domblkstat", self.name, "vda").split("wr_req")[1].split()[0])

    def goes_on(self):
        assert self.libvirt.state(self.name).startswith("running" if self.counting else "paused")
        if self.counting:
            before = self.writes()
            wait_until(lambda: self.writes() > before + 3, "the guest goes on writing")

    def write(self, disk, command):
        """Writes as the guest would: through the disk's device."""
        device = f"/machine/peripheral/virtio-disk{DISKS.index(disk)}/virtio-backend"
        line = f'qemu-io -d {device} "{command}"'
        assert "rror" not in self.libvirt.virsh("qemu-monitor-command", self.name, "--hmp", line)

    def checkpoints(self):
        return self.libvirt.virsh("checkpoint-list", self.name, "--name").split()

    def has_job(self):
        return "None" not in self.libvirt.virsh("domjobinfo", self.name)

    def process(self):
        """The number of QEMU's process."""
        # By an image: machines of other tests have the same name.
        found = subprocess.run(["pgrep", "-f", f"^/usr/bin/qemu-system-x86_64 .*{self.images['vda']}"], text=True,
                               capture_output=True, check=True)
        return int(found.stdout)

    def end(self):
        """Ends QEMU cleanly: images keep their bitmaps."""
        self.libvirt.virsh("destroy", "--graceful", self.name)
