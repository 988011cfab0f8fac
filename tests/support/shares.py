"""`coldrise serve smb` and `coldrise serve iscsi`, and clients that do what hypervisors do."""

import contextlib
import os
import pathlib
import signal
import socket
import struct
import sys
import uuid

from support.cli import ROOT
from support.foreground import ForegroundServer
from support.nbdserver import DEADLINE_S, wait_until
from support.ports import free_port

sys.path.insert(1, str(ROOT / "build" / "python"))

from smbprotocol.connection import Connection, Dialects  # noqa: E402
from smbprotocol.ioctl import CtlCode, IOCTLFlags, SMB2IOCTLRequest, SMB2IOCTLResponse  # noqa: E402
from smbprotocol.open import (  # noqa: E402
    CreateDisposition, CreateOptions, FileAttributes, FilePipePrinterAccessMask,
    ImpersonationLevel, Open, ShareAccess,
)  # fmt: skip
from smbprotocol.session import Session  # noqa: E402
from smbprotocol.tree import TreeConnect  # noqa: E402

USER, PASSWORD = "coldrise", "a password, 15"
READ = FilePipePrinterAccessMask.GENERIC_READ
WRITE = FilePipePrinterAccessMask.GENERIC_READ | FilePipePrinterAccessMask.GENERIC_WRITE
SHARE_READ, SHARE_WRITE = ShareAccess.FILE_SHARE_READ, ShareAccess.FILE_SHARE_WRITE


# What the servers have printed, by their ports: shown if a client cannot connect.
_LOGS = {}


class ShareServer(ForegroundServer):
    """On a port of its own."""

    def __init__(self, coldrise, folder, protocol, *options):
        self.port = free_port()
        _LOGS[self.port] = pathlib.Path(folder) / f"{protocol}.log"
        super().__init__(coldrise, _LOGS[self.port], protocol,
                         "--listen", f"127.0.0.1:{self.port}", *options)

    def child(self):
        """The process id of smbd or tgtd."""
        return self.children()[0]

    def folder(self):
        """The private folder."""
        arguments = pathlib.Path(f"/proc/{self.child()}/environ").read_bytes().split(b"\0")
        arguments += pathlib.Path(f"/proc/{self.child()}/cmdline").read_bytes().split(b"\0")
        found = [a.split(b"=")[-1].decode() for a in arguments if b"/coldrise-" in a and b"/state/" in a]
        return pathlib.Path(found[0]).parent.parent

    def crash(self):
        """Kills smbd or tgtd; returns once another one serves."""
        before = self.child()
        os.kill(before, signal.SIGKILL)

        def is_another():
            now = self.children()
            return now and now[0] != before and self.accepts()

        wait_until(is_another, "another server")

    def accepts(self):
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        except OSError:
            return False


class SmbClient:
    """One connection to the share, as a context manager."""

    def __init__(self, port, user=USER, password=PASSWORD, dialect=Dialects.SMB_3_1_1):
        self.connection = Connection(uuid.uuid4(), "127.0.0.1", port)
        self.connection.connect(dialect, timeout=DEADLINE_S)
        try:
            self.session = Session(self.connection, user, password, require_encryption=False)
            self.session.connect()
            self.tree = TreeConnect(self.session, r"\\127.0.0.1\coldrise")
            self.tree.connect()
        except Exception:
            if port in _LOGS:
                print(_LOGS[port].read_text(encoding="utf-8", errors="replace"))
            self.connection.disconnect(close=False)
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.connection.disconnect(close=False)

    def open(self, path, access=WRITE, share=SHARE_READ):
        """A disk as Hyper-V opens it: write-through, without buffers."""
        opened = Open(self.tree, path)
        opened.create(
            ImpersonationLevel.Impersonation, access, FileAttributes.FILE_ATTRIBUTE_NORMAL, share,
            CreateDisposition.FILE_OPEN,
            CreateOptions.FILE_NON_DIRECTORY_FILE | CreateOptions.FILE_WRITE_THROUGH
            | CreateOptions.FILE_NO_INTERMEDIATE_BUFFERING,
        )  # fmt: skip
        return opened

    def control(self, opened, code, words, answer_bytes=0):
        request = SMB2IOCTLRequest()
        request["ctl_code"] = code
        request["file_id"] = opened.file_id
        request["flags"] = IOCTLFlags.SMB2_0_IOCTL_IS_FSCTL
        request["max_output_response"] = answer_bytes
        request["buffer"] = words
        sent = self.connection.send(request, self.session.session_id, self.tree.tree_connect_id)
        answer = SMB2IOCTLResponse()
        answer.unpack(self.connection.receive(sent)["data"].get_value())
        return answer["buffer"].get_value()

    def zero(self, opened, offset, length):
        self.control(opened, CtlCode.FSCTL_SET_ZERO_DATA, struct.pack("<QQ", offset, offset + length))

    def allocated(self, opened, offset, length):
        """[(offset, length)] of the stored ranges."""
        words = struct.pack("<QQ", offset, length)
        answer = self.control(opened, CtlCode.FSCTL_QUERY_ALLOCATED_RANGES, words, 4096)
        return list(struct.iter_unpack("<QQ", answer))
