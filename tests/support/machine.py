"""A QEMU without a guest, and its monitor."""

import contextlib
import json
import socket
import subprocess

from support.nbdserver import wait_until


class Machine:
    """A stopped QEMU with a SCSI controller; `qmp` is the address of its monitor."""

    def __init__(self, folder, *options):
        self.socket = folder / "qmp"
        self.qmp = f"qmp:{self.socket}"
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", "-S", "-m", "64", "-nodefaults", "-display", "none", "-device",
             "virtio-scsi-pci,id=sc0", "-qmp", f"unix:{self.socket},server=on,wait=off", *options],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: self.answers() or self.process.poll() is not None, "QEMU")

    def answers(self):
        """QEMU makes the socket before it listens there, and greets only when it has started."""
        try:
            return self.execute("query-status")
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def execute(self, command, **arguments):
        """The result of one command. The monitor serves one client at a time, so each has its own connection."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(30)
            stream.connect(str(self.socket))
            lines = stream.makefile("rw")
            lines.readline()
            for request in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                lines.write(json.dumps(request) + "\n")
                lines.flush()
                answer = {}
                while not {"return", "error"} & answer.keys():
                    answer = json.loads(lines.readline())
            return answer.get("return", answer.get("error"))

    def node(self, name):
        nodes = self.execute("query-named-block-nodes", flat=True)
        return next((node for node in nodes if node["node-name"] == name), None)

    def io(self, device, command):
        """The output of qemu-io for a command on a disk; QEMU prints it in two lines on stdout."""
        line = f'qemu-io -d {device} "{command}"'
        refused = self.execute("human-monitor-command", **{"command-line": line})
        return refused or self.process.stdout.readline() + self.process.stdout.readline()

    def end(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def machine(folder, *options):
    running = Machine(folder, *options)
    try:
        yield running
    finally:
        running.end()
