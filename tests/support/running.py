"""A running machine in QEMU, with a guest that counts on two disks."""

import contextlib
import json
import os
import pathlib
import socket
import struct
import subprocess
import tempfile

from .nbdserver import wait_until

MIB = 1 << 20
DISKS = ("vda", "vdb")
SIZE = 64 * MIB
COUNTER_OFFSET = 8 * 512
RING_OFFSET = 2048 * 512
RING_STEP = 8 * 512
RING_SLOTS = 2048

# A boot sector for real mode. It fills a sector with the number of the round and writes it, each time
# after the earlier write is done: to sector 8 of the first disk, to sector 8 of the second disk, to
# sector 2048 + 8 * (round % 2048) of the first disk. A failed write prints E on port 0xe9 and ends it.
COUNTING_SECTOR = bytes.fromhex(
    "fa31c08ed88ec08ed0bc007cfbfc66a1007e6640bf007eb9800066f3ab66c7066c7c08000000b280e82400b281e81f0066"
    "a1007e6625ff07000066c1e00366050008000066a36c7cb280e80200ebbfbe647cb80043cd137201c3b045e6e9f4ebf9"
    "8d740010000100007e00000800000000000000"
)

# The same with a ring of 32 rounds: it writes four areas of 64 KiB again and again, the unit in which QEMU copies.
BUSY_SECTOR = COUNTING_SECTOR.replace(bytes.fromhex("6625ff070000"), bytes.fromhex("66251f000000"))

# The same, one round at each tick of the timer, 18 in a second. It releases disks of which the machine (pc) wants that.
#   hlt; mov dx,0xae10; xor eax,eax; out dx,eax; mov dx,0xae04; in eax,dx; mov dx,0xae08; out dx,eax; jmp 0x7c0e
TICKING_SECTOR = (COUNTING_SECTOR[:0x4d] + bytes.fromhex("eb25") + COUNTING_SECTOR[0x4f:]
                  + bytes.fromhex("f4" "ba10ae" "6631c0" "66ef" "ba04ae" "66ed" "ba08ae" "66ef" "eb85"))


class Machine:
    """QEMU with two disks, and a guest of one sector; without one it is paused before its first instruction."""

    def __init__(self, folder, sector=None, image_format="qcow2", size=SIZE, device="virtio-blk-pci", more=()):
        # Short: addresses of sockets are.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="qemu-"))
        self.monitor = self.folder / "qmp"
        self.second_monitor = self.folder / "qmp2"
        self.format = image_format
        self.images = {name: folder / f"{name}.{image_format}" for name in DISKS}
        for image in self.images.values():
            if not image.exists():
                subprocess.run(["qemu-img", "create", "-q", "-f", image_format, image, str(size)], check=True)
        floppy = self.folder / "floppy"
        floppy.write_bytes((sector or b"").ljust(510, b"\0") + b"\x55\xaa" + bytes(1474560 - 512))
        self.failures = self.folder / "failures"
        command = ["qemu-system-x86_64", "-machine", "pc,graphics=off", "-nodefaults", "-display", "none",
                   "-m", "16", "-boot", "a", "-drive", f"if=floppy,format=raw,file={floppy}",
                   "-debugcon", f"file:{self.failures}", "-object", "iothread,id=io",
                   "-qmp", f"unix:{self.monitor},server=on,wait=off",
                   "-qmp", f"unix:{self.second_monitor},server=on,wait=off", *more]
        for number, (name, image) in enumerate(self.images.items(), 1):
            command += ["-blockdev", f"driver={image_format},node-name={name},cache.no-flush=on,file.driver=file,"
                        f"file.filename={image},file.cache.no-flush=on",
                        "-device", f"{device},id=d{name},drive={name},bootindex={number}"]
        if sector is None:
            command.append("-S")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(self.second_monitor.exists, "QEMU")
        self.qmp = wait_until(self._connect, "QEMU's monitor")
        if sector is not None:
            wait_until(lambda: self.counter() > 5, "the counting guest")

    def _connect(self):
        with contextlib.suppress(ConnectionRefusedError):
            return Monitor(self.second_monitor)
        return None

    def counter(self):
        """The round of the guest, as it is written on the first disk."""
        stats = self.qmp.ask("query-blockstats")
        return sum(entry["stats"]["wr_operations"] for entry in stats) // 3

    def write(self, disk, command):
        """Writes as the guest would: through the disk's device."""
        line = f"qemu-io -d {self.device(disk)} \"{command}\""
        assert "rror" not in self.qmp.ask("human-monitor-command", **{"command-line": line})

    def device(self, disk):
        """The path or id of the disk's device."""
        devices = [entry.get("qdev", "") for entry in self.qmp.ask("query-block")]
        return next(device for device in devices if f"d{disk}" in device.split("/"))

    def bitmaps(self, disk="vda"):
        """The dirty bitmaps of a disk by name."""
        nodes = self.qmp.ask("query-named-block-nodes", flat=True)
        node = next(node for node in nodes if node["node-name"] == disk)
        return {bitmap["name"]: bitmap for bitmap in node.get("dirty-bitmaps", []) if "name" in bitmap}

    def leftovers(self):
        """All of Coldrise that is in QEMU, apart from bitmaps."""
        found = [e["id"] for e in self.qmp.ask("query-block-exports")]
        found += [j["id"] for j in self.qmp.ask("query-jobs")]
        found += [n["node-name"] for n in self.qmp.ask("query-named-block-nodes", flat=True)]
        used = [b["inserted"]["node-name"] for b in self.qmp.ask("query-block") if "inserted" in b]
        # QEMU keeps the numbers of closed files as long as the machine does not run.
        files = self.qmp.ask("query-fdsets") if self.status() == "running" else []
        return [name for name in found + used if name.startswith("coldrise")] + files

    def status(self):
        return self.qmp.ask("query-status")["status"]

    def close(self):
        """Ends QEMU cleanly: images keep their bitmaps."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError, AssertionError):
                self.qmp.ask("quit")
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.qmp.close()
        subprocess.run(["rm", "-rf", self.folder], check=True)


@contextlib.contextmanager
def machines(folder):
    """Starts machines; all are ended."""
    with contextlib.ExitStack() as stack:
        def start(**options):
            running = Machine(folder, **options)
            stack.callback(running.close)
            return running

        yield start


class Monitor:
    """A client of QEMU's monitor."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("r", encoding="utf-8")
        assert "QMP" in json.loads(self.lines.readline())
        self.ask("qmp_capabilities")

    def ask(self, command, **arguments):
        request = {"execute": command, "arguments": arguments}
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        while True:
            answer = json.loads(self.lines.readline())
            if "event" not in answer:
                assert "error" not in answer, (command, answer)
                return answer["return"]

    def wait_for(self, *events):
        """The name of the next of these events."""
        while True:
            name = json.loads(self.lines.readline()).get("event")
            if name in events:
                return name

    def close(self):
        self.lines.close()
        self.socket.close()


def restored(coldrise, address, folder):
    """The disks of a point as raw images."""
    images = [folder / f"restored-{disk}.raw" for disk in DISKS]
    for disk, image in zip(DISKS, images):
        coldrise.json("restore", f"{address}/{disk}", image, "--force")
    return images


def assert_same_as_now(coldrise, address, machine, folder):
    """Whether a point has the content of the machine's images, which are not written."""
    for disk, image in zip(DISKS, restored(coldrise, address, folder)):
        machine.write(disk, "flush")
        command = ["qemu-img", "compare", "-U", "-f", "raw", "-F", machine.format, image, machine.images[disk]]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0, disk


def assert_one_instant(vda, vdb):
    """Whether two raw images are the two disks of the counting guest at one instant. Returns the round."""
    first, second = rounds_at(vda, COUNTER_OFFSET), rounds_at(vdb, COUNTER_OFFSET)
    assert first - second in (0, 1), (first, second)
    slots = [rounds_at(vda, RING_OFFSET + slot * RING_STEP) for slot in range(RING_SLOTS)]
    newest = max(slots)
    assert second - newest in (0, 1), (second, newest)
    for number in range(max(1, newest - RING_SLOTS + 1), newest + 1):
        assert slots[number % RING_SLOTS] == number, f"round {number} of {newest} is lost"
    return first


def rounds_at(image, offset):
    """The number in a sector, all of which is from one write."""
    with open(image, "rb") as file:
        sector = os.pread(file.fileno(), 512, offset)
    numbers = set(struct.unpack("<128I", sector))
    assert len(numbers) == 1, "a torn sector"
    return numbers.pop()


def counter_in_use(image, offset):
    """The number in a sector of an image that QEMU uses."""
    image_format = "qcow2" if image.suffix == ".qcow2" else "raw"
    command = ["qemu-io", "-U", "-r", "-f", image_format, "-c", f"read -v {offset} 512", image]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first = next(line for line in said.splitlines() if line.startswith(f"{offset:08x}:"))
    return int.from_bytes(bytes.fromhex("".join(first.split()[1:5])), "little")
