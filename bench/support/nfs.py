"""NFS servers under measurement, each in its own network, because rpcbind registers one."""

from __future__ import annotations

from pathlib import Path

from tests.support import nfs3
from tests.support.network import Network

from .coldrise import Coldrise
from .commands import run
from .servers import Server
from .setting import Setting

PEER = "Ganesha FSAL_VFS"
# The standard ports, where fio's engine and QEMU find a server.
NFS_PORT = 2049

_VFS_CONFIGURATION = """
NFS_CORE_PARAM {{
    Protocols = 3;
    Bind_Addr = 127.0.0.1;
    MNT_Port = 20048;
    Enable_UDP = false;
    Enable_NLM = false;
    Enable_RQUOTA = false;
}}
NFS_KRB5 {{ Active_krb5 = false; }}
EXPORT {{
    Export_Id = 1;
    Path = {folder};
    Protocols = 3;
    Transports = TCP;
    SecType = sys;
    Access_Type = RW;
    Squash = No_Root_Squash;
    FSAL {{ Name = VFS; }}
}}
"""


class NfsServer(Server):
    """A server that is ready once it can be mounted. Its network ends with it."""

    def __init__(self, network: Network, argv: list, export: str, socket: Path, **options) -> None:
        super().__init__(network.command(*argv), socket, **options)
        self.network = network
        self.export = export

    def uri(self, export: str = "") -> str:
        return f"nfs://127.0.0.1{self.export}/{export}".rstrip("/")

    def root(self) -> bytes:
        return nfs3.mount(self.network, self.export)

    def connect(self) -> nfs3.Nfs:
        return nfs3.Nfs(self.network, port=NFS_PORT)

    def _is_ready(self) -> bool:
        try:
            self.root()
        except (OSError, nfs3.Refused):
            return False
        return True

    def _stop(self) -> None:
        super()._stop()
        self.network.close()


def coldrise_nfs(setting: Setting, coldrise: Coldrise) -> NfsServer:
    argv = [setting.program, "serve", "nfs", "--versions", "3"]
    return NfsServer(Network(), argv, "/coldrise", setting.socket("nfs"), env=coldrise.env)


def ganesha_vfs(setting: Setting, folder: Path) -> NfsServer:
    """nfs-ganesha's own FSAL for files, on a folder; otherwise configured like ours."""
    configuration = setting.folder("vfs") / "ganesha.conf"
    configuration.write_text(_VFS_CONFIGURATION.format(folder=folder))
    start = (
        "rpcbind -f & until [ -S /run/rpcbind.sock ]; do sleep 0.01; done;"
        ' exec ganesha.nfsd -F -L STDERR -f "$1" -p "$1.pid"'
    )
    argv = ["sh", "-c", start, "sh", configuration]
    return NfsServer(Network(), argv, str(folder), setting.socket("vfs"))


def fio_program(setting: Setting) -> Path:
    """fio with its NFS engine, which Debian's package lacks; built once."""
    lines = run([setting.project / "bench/build-fio.sh", setting.store / "fio"]).strip().splitlines()
    return Path(lines[-1])
