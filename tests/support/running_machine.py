"""A running QEMU without a guest, its monitor, and a writer in place of the guest."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time

import nbd

from .nbdserver import DEADLINE_S, wait_until


class Monitor:
    """A client of QEMU's monitor."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("rwb")
        assert "QMP" in json.loads(self.lines.readline())
        self.execute("qmp_capabilities")

    def execute(self, command, **arguments):
        self.lines.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self.lines.flush()
        while True:
            answer = json.loads(self.lines.readline())
            if "return" in answer or "error" in answer:
                assert "return" in answer, answer
                return answer["return"]


class Machine:
    """QEMU with disks over NBD, each of which a writable export offers to a writer."""

    def __init__(self, folder, server_socket, exports, boot=None, options=()):
        """`boot`: a sector that the machine boots from a floppy; without it, no processor runs. `options`: more of
        QEMU's."""
        self.folder = folder
        folder.mkdir()
        self.exports = exports
        command = ["qemu-system-x86_64", "-machine", "pc", "-accel", "tcg", "-m", "32M",
                   "-nodefaults", "-display", "none", *options]
        if boot is None:
            command.append("-S")
        else:
            floppy = folder / "floppy"
            floppy.write_bytes(boot.ljust(510, b"\0") + b"\x55\xaa" + bytes(1474560 - 512))
            command += ["-boot", "a", "-drive", f"if=floppy,format=raw,file={floppy}"]
        for name in ("qmp", "own"):
            command += ["-qmp", f"unix:{folder}/{name},server=on,wait=off"]
        for disk, export in exports.items():
            node = {"driver": "nbd", "node-name": disk, "export": export, "reconnect-delay": 60,
                    "server": {"type": "unix", "path": str(server_socket)}, "discard": "unmap"}
            command += ["-blockdev", json.dumps(node)]
            command += ["-device", f"virtio-blk-pci,drive={disk},id=d{disk},share-rw=on"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(lambda: (folder / "own").exists() or self.process.poll() is not None, "QEMU")
        wait_until(self.answers, "QEMU")
        address = {"type": "unix", "data": {"path": str(folder / "disks")}}
        self.monitor.execute("nbd-server-start", addr=address)
        for disk in exports:
            self.monitor.execute("block-export-add", id=f"e-{disk}", type="nbd", writable=True,
                                 **{"node-name": disk, "name": disk})

    def answers(self):
        try:
            self.monitor = Monitor(self.folder / "own")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True

    @property
    def qmp(self):
        return self.folder / "qmp"

    def disk(self, name):
        handle = nbd.NBD()
        handle.connect_uri(f"nbd+unix:///{name}?socket={self.folder}/disks")
        return handle

    def files(self):
        """The file or export of each device's disk."""
        return [device["inserted"]["file"] for device in self.monitor.execute("query-block")]

    def jobs(self):
        return self.monitor.execute("query-jobs")

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Writer:
    """Writes a counter to the first sector of each disk in turn, each write durable before the next."""

    def __init__(self, machine):
        self.disks = [machine.disk(name) for name in machine.exports]
        self.done = 0
        self.ending = False
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def write(self):
        with contextlib.suppress(nbd.Error):
            while not self.ending:
                number = (self.done + 1).to_bytes(512, "little")
                for disk in self.disks:
                    disk.pwrite(number, 0, nbd.CMD_FLAG_FUA)
                self.done += 1
                # Leaves the processors to those that copy.
                time.sleep(0.005)

    def goes_on(self):
        before = self.done
        wait_until(lambda: self.done > before + 3, "the machine goes on writing")

    def end(self):
        """Ends after a whole round; returns the counter."""
        self.ending = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.done


class Relay:
    """Stands between a program and QEMU's monitor, and acts when a command comes by."""

    def __init__(self, path, qmp, command, action, is_after):
        self.watched = json.dumps(command).encode()
        self.action = action
        self.is_after = is_after
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.qmp = str(qmp)
        self.path = path
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        client, _ = self.listener.accept()
        # Later callers find that QEMU has exited.
        self.listener.close()
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(self.qmp)
            threading.Thread(target=self.answer, args=(monitor, client), daemon=True).start()
            while True:
                line, files, _, _ = socket.recv_fds(client, 1 << 16, 4)
                if not line:
                    break
                is_due = self.watched in line
                if is_due and not self.is_after:
                    self.action()
                    break
                socket.send_fds(monitor, [line], files)
                for file in files:
                    os.close(file)
                if is_due:
                    # QEMU executes commands in order: this one is done when the next is answered.
                    self.action()
                    break
            # Another thread reads it: a close alone would wait for that.
            monitor.shutdown(socket.SHUT_RDWR)
            client.close()

    def answer(self, monitor, client):
        with contextlib.suppress(OSError):
            while answer := monitor.recv(1 << 16):
                client.sendall(answer)


def kill(process):
    """Kills a process that is not only our child."""
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=DEADLINE_S)
