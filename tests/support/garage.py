"""Garage, another real S3 server, as a node of its own on the loopback. `make test-bucket-garage` builds it."""

import contextlib
import secrets
import socket
import subprocess

from support.nbdserver import wait_until
from support.ports import free_port
from support.s3 import S3Server

CONFIGURATION = """
metadata_dir = "{folder}/meta"
data_dir = "{folder}/data"
db_engine = "sqlite"
replication_factor = 1
rpc_bind_addr = "127.0.0.1:{rpc}"
rpc_public_addr = "127.0.0.1:{rpc}"
rpc_secret = "{secret}"
[s3_api]
s3_region = "us-east-1"
api_bind_addr = "127.0.0.1:{port}"
root_domain = ".s3.garage"
"""


class GarageServer(S3Server):
    """As S3Server; its stored files cannot be inspected."""

    def __init__(self, folder, program):
        access, secret = f"GK{secrets.token_hex(12)}", secrets.token_hex(32)
        super().__init__(folder, access=access, secret=secret)
        self.program = program
        self.configuration = folder / "garage.toml"
        rpc = free_port()
        self.configuration.write_text(
            CONFIGURATION.format(folder=folder, rpc=rpc, port=self.port, secret=secrets.token_hex(32)), encoding="utf-8")
        self.is_new = True

    def start(self):
        with open(self.output_path, "a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                self.words("server"), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_until(self._answers, "garage answers")
        if self.is_new:
            self.is_new = False
            node = self.ask("node", "id", "-q").split("@")[0]
            self.ask("layout", "assign", "-z", "here", "-c", "10G", node)
            self.ask("layout", "apply", "--version", "1")
            wait_until(lambda: self.tries("bucket", "create", self.bucket), "the bucket")
            self.ask("key", "import", "--yes", "-n", "tests", self.access, self.secret)
            self.ask("bucket", "allow", "--read", "--write", self.bucket, "--key", self.access)
        return self

    def words(self, *words):
        return [str(word) for word in (self.program, "-c", self.configuration, *words)]

    def tries(self, *words):
        return subprocess.run(self.words(*words), capture_output=True, check=False).returncode == 0

    def ask(self, *words):
        return subprocess.run(self.words(*words), capture_output=True, check=True, text=True).stdout.strip()

    def _answers(self):
        assert self.process.poll() is None, self.output_path.read_text(encoding="utf-8")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return self.tries("status")
        return False
