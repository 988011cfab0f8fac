"""SMB and iSCSI servers under measurement: Coldrise's, and the same programs on a plain file."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

from .coldrise import Coldrise
from .commands import run
from .figures import Failure
from .fio import Load, Outcome, over_iscsi
from .servers import Server
from .setting import Setting

SMBD, TGTD = "smbd on a plain file", "tgtd on a plain file"
PASSED = "the same on it through FUSE"
_PASSTHROUGH = "/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c"
_USER, _PASSWORD = "coldrise", "measured, 15 chars"
_SHARE = "coldrise"
_TARGET = "iqn.2026-11.localhost.plain"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ShareServer(Server):
    """A server on a port of loopback."""

    def __init__(self, setting: Setting, name: str, argv: list, port: int, **options) -> None:
        super().__init__(argv, setting.socket(name), **options)
        self.port = port

    def _is_ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def child(self) -> int:
        """The process id of the program that the server runs."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])


class _Coldrise(ShareServer):
    """`coldrise serve smb` or `coldrise serve iscsi`, which says when clients are served."""

    def _is_ready(self) -> bool:
        return Server._is_ready(self)


class _Tgtd(ShareServer):
    def _stop(self) -> None:
        # It does not end by SIGTERM.
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
        super()._stop()


class _Passed(Server):
    """A folder through libfuse's example that only passes requests on, mounted as Coldrise mounts: the kernel
    caches reads and passes each write on at once."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        program = setting.store / "passthrough"
        run(["gcc", "-O2", "-o", program, _PASSTHROUGH, *run(["pkg-config", "--cflags", "--libs", "fuse3"]).split()])
        self.folder = setting.folder("passed")
        options = f"source={folder},cache=auto,clone_fd,max_threads=8"
        super().__init__([program, "-f", "-o", options, self.folder], setting.socket("passed"))

    def _is_ready(self) -> bool:
        return self.folder.is_mount()

    def _stop(self) -> None:
        if self.folder.is_mount():
            run(["umount", "--lazy", self.folder])
        super()._stop()


def passed(setting: Setting, folder: Path) -> _Passed:
    return _Passed(setting, folder)


def coldrise_smb(setting: Setting, coldrise: Coldrise) -> ShareServer:
    secret = setting.work / "smb.password"
    secret.write_text(_PASSWORD + "\n")
    port = _free_port()
    argv = [setting.program, "serve", "smb", "--listen", f"127.0.0.1:{port}", "--password-file", secret]
    return _Coldrise(setting, "smb", argv, port, env=coldrise.env, wait_for_line="ready")


def plain_smb(setting: Setting, like: ShareServer, folder: Path) -> ShareServer:
    """smbd on a folder, configured as the one that `like` runs."""
    words = Path(f"/proc/{like.child()}/cmdline").read_bytes().split(b"\0")
    theirs = Path(os.fsdecode(words[words.index(b"--configfile") + 1]))
    state, port = setting.folder("smb-state"), _free_port()
    text = theirs.read_text().replace(str(theirs.parent), str(state))
    text = re.sub(r"(?m)^    path = .*", f"    path = {folder}", text)
    text = re.sub(r"(?m)^    smb ports = .*", f"    smb ports = {port}", text)
    (state / "users").write_text((theirs.parent / "users").read_text())
    configuration = state / "smb.conf"
    configuration.write_text(text)
    run(["smbpasswd", "-c", configuration, "-s", "-a", "root"], stdin=f"{_PASSWORD}\n{_PASSWORD}\n".encode())
    argv = ["smbd", "--foreground", "--no-process-group", "--debug-stdout", "--configfile", configuration]
    return ShareServer(setting, "smbd", argv, port)


def coldrise_iscsi(setting: Setting, coldrise: Coldrise, sessions: list[str]) -> ShareServer:
    port = _free_port()
    argv = [setting.program, "serve", "iscsi", *sessions, "--listen", f"127.0.0.1:{port}"]
    return _Coldrise(setting, "iscsi", argv, port, env=coldrise.env, wait_for_line="ready")


def plain_iscsi(setting: Setting) -> ShareServer:
    """tgtd without a target."""
    port = _free_port()
    argv = ["tgtd", "--foreground", "--control-port", "0", "--iscsi", f"portal=127.0.0.1:{port}"]
    return _Tgtd(setting, "tgtd", argv, port, env=_control(setting))


def _control(setting: Setting) -> dict[str, str]:
    return {"TGT_IPC_SOCKET": str(setting.sockets / "tgt")}


def add_plain_target(setting: Setting, file: Path) -> None:
    """Offers a file as the session's disk is offered."""
    one = ["--lld", "iscsi", "--tid", "1"]
    lun = ["--mode", "logicalunit", *one, "--lun", "1"]
    for words in (
        ["--op", "new", "--mode", "target", *one, "--targetname", _TARGET],
        ["--op", "new", *lun, "--bstype", "rdwr", "--backing-store", file],
        ["--op", "update", *lun, "--params", "thin_provisioning=1"],
        ["--op", "bind", "--mode", "target", *one, "--initiator-address", "ALL"],
    ):
        run(["tgtadm", "--control-port", "0", *words], env=_control(setting))


def iscsi_uri(server: ShareServer, session: str | None) -> str:
    """The URI of a session's disk; without a session, of the plain file."""
    name = f"iqn.2026-11.localhost.coldrise:live:{session}" if session else _TARGET
    return f"iscsi://127.0.0.1:{server.port}/{name}/1"


def smb_program(setting: Setting) -> Path:
    """The SMB load, built from its source."""
    program = setting.store / "smb_load"
    source = Path(__file__).with_suffix("").with_name("smb_load.c")
    flags = run(["pkg-config", "--cflags", "--libs", "smbclient"]).split()
    run(["gcc", "-O2", "-Wall", "-o", program, source, *flags])
    return program


def smb_requests(program: Path, kind: str, server: ShareServer, path: str, load: Load) -> float:
    """Requests per second of one kind: read, reread or write."""
    url = f"smb://127.0.0.1:{server.port}/{_SHARE}/{path}"
    said = run([program, kind, url, _USER, load.size_bytes, load.depth, load.seconds],
               env={"SMB_PASSWORD": _PASSWORD, "HOME": "/nonexistent"})
    try:
        return float(said.split()[-1])
    except (IndexError, ValueError) as error:
        raise Failure(f"smb_load: {said[-200:]!r}") from error


def iscsi_requests(program: Path, server: ShareServer, session: str | None, load: Load) -> Outcome:
    return over_iscsi(program, load, iscsi_uri(server, session))
