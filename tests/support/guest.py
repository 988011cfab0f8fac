"""A guest in QEMU, driven over its serial console.

    with Guest([raw_disk("guest.raw")], log="console.log") as guest:
        seconds = guest.wait_for_login(timeout=120)
        guest.login()
        status, output = guest.run("uname -r")
        guest.poweroff()

The console is one end of a socket pair that QEMU inherits, so no name can
collide and no output can be lost. A thread reads it, keeps
it in memory and appends it to the log file; readers wait on a condition
with a deadline, and every error ends with the console's tail.

Commands travel quoted in short lines to a plain shell without echo or line
editing, and their output comes back as base64 with a checksum. So neither quoting
nor a kernel message between two lines of output can change what a test sees. An
emulated processor takes 50 ms to start a program: the protocol starts two at most.

KVM is used where it works, which is more than where /dev/kvm exists: see kvm_works.

Tests that need a running guest and no boot take one of support/snapshot.py.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path

QEMU = "qemu-system-x86_64"
IMAGES = Path(__file__).resolve().parents[2] / "images"
LOGIN_PROMPT = b"coldrise-guest login: "
TAIL_BYTES = 2000
# A terminal in line mode takes at most 4095 bytes at a time.
LINE_BYTES = 2048
_BASE64_LINE = re.compile(rb"[A-Za-z0-9+/=]{40,}")


class GuestError(Exception):
    """The guest did not do as requested; the message holds the console's tail."""


class GuestTimeout(GuestError):
    """A deadline passed."""


def image(recipe: str = "guest") -> Path:
    """The bootable disk of a folder of images/, from the cache or built."""
    built = subprocess.run([IMAGES / recipe / "build.sh"], stdin=subprocess.DEVNULL, capture_output=True,
                           text=True, timeout=1800, check=False)
    if built.returncode != 0:
        raise GuestError(f"images/{recipe}/build.sh ended with exit status {built.returncode}:\n{built.stderr[-TAIL_BYTES:]}")
    return Path(built.stdout.splitlines()[-1])


# --------------------------------------------------------------------- disks


def raw_disk(path, *, name: str = "disk0", read_only: bool = False) -> list[str]:
    """QEMU arguments for a raw image file as a virtio disk."""
    return _disk(name, f"driver=raw,file.driver=file,file.filename={_escape(path)}", read_only)


def qcow2_disk(path, *, name: str = "disk0") -> list[str]:
    """The same for a qcow2 file that is thrown away: the guest's flushes wait for no drive."""
    return _disk(name, f"driver=qcow2,cache.no-flush=on,file.driver=file,file.filename={_escape(path)}", False)


def nbd_disk(uri: str, *, name: str = "disk0", read_only: bool = False) -> list[str]:
    """QEMU arguments for an NBD export on a Unix socket as a virtio disk.

    The URI is nbd+unix:///EXPORT?socket=PATH; an export's name may hold slashes.
    """
    export, path = parse_nbd_uri(uri)
    node = f"driver=nbd,server.type=unix,server.path={_escape(path)},export={_escape(export)}"
    return _disk(name, node, read_only)


def nfs_disk(path: str, *, host: str = "127.0.0.1", name: str = "disk0") -> list[str]:
    """QEMU arguments for a raw file on an NFS server as a virtio disk."""
    node = f"driver=raw,file.driver=nfs,file.server.type=inet,file.server.host={host}"
    return _disk(name, f"{node},file.path={_escape(path)}", False)


def _disk(name: str, node: str, read_only: bool) -> list[str]:
    """With a thread of its own: QEMU's main loop takes half a millisecond for an
    answer while emulated processors keep it busy."""
    node += f",node-name={name},discard=unmap" + (",read-only=on" if read_only else "")
    return [
        "-object", f"iothread,id={name}-thread",
        "-blockdev", node,
        "-device", f"virtio-blk-pci,drive={name},discard=on,iothread={name}-thread",
    ]


def parse_nbd_uri(uri: str) -> tuple[str, str]:
    """The export's name and the socket's path of an nbd+unix URI."""
    parts = urllib.parse.urlsplit(uri)
    socket_path = urllib.parse.parse_qs(parts.query).get("socket")
    if parts.scheme != "nbd+unix" or not socket_path:
        raise ValueError(f"not an NBD URI on a Unix socket: {uri!r}; write nbd+unix:///EXPORT?socket=PATH")
    return urllib.parse.unquote(parts.path.removeprefix("/")), socket_path[0]


def _escape(value) -> str:
    """QEMU splits its options at commas; a doubled comma is a comma."""
    return str(value).replace(",", ",,")


# --------------------------------------------------------------- accelerator

# A boot sector that writes K to the serial port, again and again:
#   mov dx, 0x3f8; mov al, 'K'; again: out dx, al; jmp again
_KVM_PROBE_SECTOR = bytes.fromhex("baf803b04beeebfd").ljust(510, b"\0") + b"\x55\xaa"
KVM_PROBE_SECONDS = 3.0


@functools.cache
def kvm_works() -> bool:
    """Whether a guest under KVM really runs here.

    QEMU's own fallback (-accel kvm -accel tcg) asks only whether KVM can be
    initialised. On some nested machines it can, and the guest then crawls: so
    look for the CPU's feature first, and then let a boot sector say one letter.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    if not flags or not {"vmx", "svm"} & set(flags[1].split()):
        return False
    with tempfile.NamedTemporaryFile(suffix=".raw") as disk:
        disk.write(_KVM_PROBE_SECTOR.ljust(64 * 1024, b"\0"))
        disk.flush()
        probe = subprocess.Popen(
            [QEMU, "-accel", "kvm", "-m", "64", "-nodefaults", "-display", "none",
             "-no-reboot", "-serial", "stdio",
             "-drive", f"file={_escape(disk.name)},format=raw,if=virtio,readonly=on"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        overdue = threading.Timer(KVM_PROBE_SECONDS, probe.kill)
        overdue.start()
        try:
            # Ends at the first letter, or at the end of the killed process.
            return b"K" in _read_until(probe.stdout, b"K")
        finally:
            overdue.cancel()
            probe.kill()
            probe.wait()
            probe.stdout.close()


def _read_until(stream, wanted: bytes) -> bytes:
    """The stream up to and including `wanted`, or up to its end."""
    seen = b""
    while wanted not in seen:
        piece = os.read(stream.fileno(), 4096)
        if not piece:
            break
        seen += piece
    return seen


def accelerator_arguments() -> list[str]:
    if kvm_works():
        return ["-accel", "kvm", "-accel", "tcg", "-cpu", "max"]
    return ["-accel", "tcg,thread=multi"]


# --------------------------------------------------------------------- guest


class Guest:
    """One QEMU process and its console. Starts immediately; `close` or `with` ends it."""

    def __init__(self, disks, *, log, memory_mib: int = 1024, cpus: int = 2,
                 network: bool = False, extra=(), prefix=(), boot=None, environment=None):
        """`disks` is a list of argument lists, as raw_disk and nbd_disk give them. `prefix`
        is a command that runs QEMU. `boot` is one that boots the guest instead of it, with
        the console on its standard input and output."""
        self.log_path = Path(log)
        self._received = bytearray()
        self._changed = threading.Condition()
        self._ended = False
        self._command_number = 0
        self._shell_ready = False

        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                *prefix, QEMU, *accelerator_arguments(),
                "-m", str(memory_mib), "-smp", str(cpus),
                "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
                "-chardev", f"socket,id=console,fd={theirs.fileno()}",
                "-serial", "chardev:console",
                "-device", "virtio-rng-pci",
            ]
            for disk in disks:
                command += disk
            if network:
                command += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
            command += extra
            if boot is not None:
                command = [str(word) for word in boot]
            self.command = command
            self._log = open(self.log_path, "ab", buffering=0)
            self._log_start = self._log.tell()
            self._log.write(f"# {shlex.join(command)}\n".encode())
            self.started = time.monotonic()
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL if boot is None else theirs,
                    stdout=self._log if boot is None else theirs, stderr=self._log,
                    pass_fds=[theirs.fileno()], env=environment)
            except OSError as error:
                ours.close()
                self._log.close()
                raise GuestError(
                    f"cannot start {command[0]}: {error}; QEMU is in the package qemu-system-x86"
                ) from error
        self._console = ours
        self._reader = threading.Thread(target=self._read, name="guest console", daemon=True)
        self._reader.start()

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        """Stops the guest if it still runs, as pulling the plug would."""
        self.kill()
        self._reader.join()
        self._console.close()
        self._log.close()

    def kill(self) -> None:
        """SIGKILL to QEMU: the guest flushes nothing."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------- console

    def _read(self) -> None:
        while True:
            try:
                piece = self._console.recv(65536)
            except OSError:
                piece = b""
            if piece:
                self._log.write(piece)
            with self._changed:
                self._received += piece
                self._ended = not piece
                self._changed.notify_all()
                if not piece:
                    return

    def console(self) -> str:
        """The complete output of the console so far."""
        with self._changed:
            return self._received.decode(errors="replace")

    def tail(self) -> str:
        return self.console()[-TAIL_BYTES:].strip()

    def _send(self, line: str) -> None:
        try:
            self._console.sendall(line.encode() + b"\n")
        except OSError as error:
            raise self._error(GuestError, f"the console takes no more input ({error})") from error

    def _mark(self) -> int:
        with self._changed:
            return len(self._received)

    def _wait_for(self, pattern: bytes, start: int, timeout: float, what: str) -> re.Match:
        """Waits until the console's text from `start` on matches."""
        deadline = time.monotonic() + timeout
        compiled = re.compile(pattern, re.S)
        with self._changed:
            while True:
                found = compiled.search(self._received, start)
                if found:
                    # The buffer keeps growing; a match must not hold it.
                    return compiled.search(bytes(self._received), start)
                if self._ended:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            ended = self._ended
        if ended:
            raise self._error(GuestError, f"QEMU ended while waiting for {what}")
        raise self._error(GuestTimeout, f"waited {timeout:.0f} s in vain for {what}")

    def _error(self, kind, message: str) -> GuestError:
        return kind(f"guest (pid {self.pid}): {message}\nthe whole console is in {self.log_path}; its end:\n"
                    + "\n".join("  | " + line for line in self._log_tail().splitlines()))

    def _log_tail(self) -> str:
        # The file rather than the memory: it contains QEMU's own messages too. An
        # earlier guest's lines and the base64 of long outputs would hide the reason.
        text = self.log_path.read_bytes()[self._log_start:].replace(b"\r", b"")
        lines = [line for line in text.splitlines() if not _BASE64_LINE.fullmatch(line)]
        return b"\n".join(lines)[-TAIL_BYTES:].decode(errors="replace").strip()

    # --------------------------------------------------------------- shell

    def wait_for_login(self, timeout: float = 180) -> float:
        """Waits for the login prompt; returns the seconds since QEMU was started."""
        self._wait_for(re.escape(LOGIN_PROMPT), 0, timeout, "the login prompt")
        return time.monotonic() - self.started

    def login(self, timeout: float = 60) -> None:
        """Logs in as root and makes the shell fit for a program's use."""
        start = self._mark()
        self._send("root")
        self._wait_for(rb"root@coldrise-guest:[^\n]*# ", start, timeout, "the shell's prompt after the login")
        # A shell without echo, prompt and line editing. The answer to wait for is
        # put together by the shell, so that the echoed line does not match.
        start = self._mark()
        self._send("stty -echo -onlcr; dmesg -n 1; PS1= PS2= exec bash --norc --noprofile --noediting")
        self._send("PS1= PS2= PROMPT_COMMAND=; echo shell-'ready'")
        self._wait_for(rb"shell-ready\n", start, timeout, "the shell to start")
        self._shell_ready = True

    def run(self, command: str, timeout: float = 60) -> tuple[int, str]:
        """Runs a command with bash; returns its exit status and what it printed.

        Standard output and standard error come together; bytes that are not UTF-8
        are replaced. Each command gets a shell of its own: a cd does not last.
        """
        if not self._shell_ready:
            raise GuestError("run was called before login")
        deadline = time.monotonic() + timeout
        self._command_number += 1
        tag = f"{os.getpid()}-{self._command_number}"
        shown = command if len(command) < 80 else command[:77] + "..."

        def left() -> float:
            return max(0.1, deadline - time.monotonic())

        # For readers of the log: the console itself shows only base64.
        self._log.write(f"\n# {tag}: {command}\n".encode())
        self._send("C=")
        for line in _quoted_lines(command):
            start = self._mark()
            self._send(f"C+={line}; echo took-'{tag}'")
            self._wait_for(f"took-{tag}\n".encode(), start, left(), f"the guest to take in: {shown}")
        start = self._mark()
        self._send(f'( eval "$C" ) </dev/null >/run/output 2>&1; echo status-\'{tag}\' $?')
        found = self._wait_for(rf"status-{tag} (\d+)\n".encode(), start, left(), f"the end of: {shown}")
        return int(found[1]), self._fetch_output(tag, left, shown).decode(errors="replace")

    def check(self, command: str, timeout: float = 60) -> str:
        """As run, for commands that must succeed; returns the output alone."""
        status, output = self.run(command, timeout)
        if status != 0:
            raise self._error(GuestError, f"exit status {status} of: {command}\n{output.strip()}")
        return output

    def take_over(self) -> None:
        """Uses the shell of a guest that continues from a snapshot, whose clock stood still."""
        self._shell_ready = True
        self.check(f"date --set=@{time.time():.3f}")

    def _fetch_output(self, tag: str, left, shown: str) -> bytes:
        for _ in range(3):
            start = self._mark()
            self._send(f"echo out'put-{tag}'; [ ! -s /run/output ] || {{ base64 /run/output; md5sum </run/output; }}; "
                       f"echo end-'{tag}'")
            found = self._wait_for(rf"output-{tag}\n(.*?)end-{tag}\n".encode(), start, left(),
                                   f"the output of: {shown}")
            output = _decode_output(found[1])
            if output is not None:
                return output
        raise self._error(GuestError, f"three times the console garbled the output of: {shown}")

    # ----------------------------------------------------------------- end

    def poweroff(self, timeout: float = 90) -> None:
        """Shuts the guest down in good order and waits until QEMU has ended."""
        if not self._shell_ready:
            raise GuestError("poweroff was called before login")
        self._send("sync; systemctl poweroff 2>/dev/null")
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._error(GuestTimeout, f"waited {timeout:.0f} s in vain for the guest to power off") from None
        if status != 0:
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise self._error(GuestError, f"QEMU ended with {name} at the power-off")


def _quoted_lines(command: str) -> list[str]:
    """Words of bash that are the command when put together, each shorter than a terminal's line."""
    letters = "".join(map(chr, range(0x20, 0x7f))).translate(str.maketrans("", "", "'\\!"))
    quoted = [chr(byte) if chr(byte) in letters else f"\\x{byte:02x}" for byte in command.encode()]
    step = LINE_BYTES // 4
    return [f"$'{''.join(quoted[at:at + step])}'" for at in range(0, len(quoted), step)]


def _decode_output(text: bytes) -> bytes | None:
    """The bytes behind a base64 listing and its md5sum line; None if garbled."""
    lines = text.split()
    if not lines:
        return b""
    if len(lines) < 2 or lines[-1] != b"-":
        return None
    try:
        output = base64.b64decode(b"".join(lines[:-2]), validate=True)
    except binascii.Error:
        return None
    return output if hashlib.md5(output).hexdigest().encode() == lines[-2] else None
