"""vcsim, govmomi's simulator of vCenter, in a private network; and pyvmomi, which says what it holds."""

import json
import subprocess
import sys

from support.certificates import self_signed
from support.cli import ROOT
from support.nbdserver import DEADLINE_S, wait_until

VCSIM = ROOT / "build/vcsim/vcsim"
USER, PASSWORD = "backup@vsphere.local", "se<cr&et 'x'"

# In a process of its own: it must run in the private network.
LOOK = """
import json, ssl, sys
sys.path.insert(0, sys.argv[1])
from pyVim.connect import Disconnect, SmartConnect
from pyVmomi import vim
tls = ssl.create_default_context(cafile=sys.argv[2])
site = SmartConnect(host="127.0.0.1", port=int(sys.argv[3]), user=sys.argv[4], pwd=sys.argv[5], sslContext=tls)
content = site.RetrieveContent()
def all_of(kind):
    return list(content.viewManager.CreateContainerView(content.rootFolder, [kind], True).view)
nas = {}
for store in all_of(vim.Datastore):
    if isinstance(store.info, vim.host.NasDatastoreInfo):
        nas[store.name] = {"server": store.info.nas.remoteHost, "path": store.info.nas.remotePath,
                           "hosts": sorted(mount.key.name for mount in store.host)}
machines = {}
for machine in all_of(vim.VirtualMachine):
    cards = [device for device in machine.config.hardware.device if isinstance(device, vim.vm.device.VirtualEthernetCard)]
    machines[machine.name] = {"state": machine.runtime.powerState, "path": machine.config.files.vmPathName,
                              "datastores": [store.name for store in machine.datastore],
                              "host": machine.runtime.host.name,
                              "connected": [card.connectable.startConnected for card in cards],
                              "addresses": [card.macAddress for card in cards]}
sessions = len(content.sessionManager.sessionList)
print(json.dumps({"nas": nas, "machines": machines, "sessions": sessions}))
Disconnect(site)
"""


class Vcenter:
    """A running vcsim. Its datastores are folders in `folder`."""

    def __init__(self, network, folder, kind="vcenter"):
        self.network, self.folder = network, folder
        folder.mkdir(exist_ok=True)
        key, self.certificate = self_signed(folder, "vcsim")
        self.password_file = folder / "password"
        self.password_file.write_text(PASSWORD + "\n", encoding="utf-8")
        self.log_path = folder / "log"
        with open(self.log_path, "w", encoding="utf-8") as log:
            # The files of the datastores may be mounted outside the private network.
            self.process = subprocess.Popen(
                ["nsenter", "--target", str(network.process.pid), "--net", "--", VCSIM, folder, self.certificate, key,
                 USER, PASSWORD, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        assert line, self.log_path.read_text(encoding="utf-8")
        self.port = int(line)
        self.server = f"127.0.0.1:{self.port}"

    def thumbprint(self):
        """Of its certificate, as openssl prints it."""
        words = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", self.certificate]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return done.stdout.split("=")[1].strip()

    def order(self, *words):
        """A command of vcsim: see vcsim/main.go."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n", self.log_path.read_text(encoding="utf-8")

    def calls(self):
        """The names of the calls that change something, in their order."""
        lines = self.log_path.read_text(encoding="utf-8").splitlines()
        return [line.removeprefix("call ") for line in lines if line.startswith("call ")]

    def answered(self):
        """The answers to the question."""
        lines = self.log_path.read_text(encoding="utf-8").splitlines()
        return [line.removeprefix("answered ") for line in lines if line.startswith("answered ")]

    def questions(self):
        """The number of calls that change nothing."""
        return self.log_path.read_text(encoding="utf-8").splitlines().count("asked")

    def wait_for(self, call, times=1):
        wait_until(lambda: self.calls().count(call) >= times, call)

    def look(self):
        """The state as pyvmomi reports it."""
        done = self.network.run(sys.executable, "-c", LOOK, ROOT / "build/python", self.certificate, self.port, USER,
                                PASSWORD)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def make_datastore_folder(self, session, machine, vmx):
        """Files that vcsim expects in the datastore: it creates none of them, and ESXi needs none of them."""
        folder = self.folder / "coldrise-127.0.0.1" / session
        folder.mkdir(parents=True)
        (folder / f"{session}.vmx").symlink_to(vmx)
        (folder / f"{machine}.nvram").touch()
        (folder / "vmware.log").touch()

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
