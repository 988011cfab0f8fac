"""coldrise files: a machine whose port appears late, as on a busy host."""

import stat
import sys

from support import filesystems
from test_files import MIB, content, files, names, runtime

__all__ = ["runtime"]

# In place of QEMU: starts it without the port, and adds that when the machine has read its disk.
WRAPPER = """#!{python} -IS
import json, os, socket, sys, time
words = sys.argv[1:]
at = next(number for number, word in enumerate(words) if word.startswith("virtserialport,"))
options = dict(option.split("=") for option in words[at].split(",")[1:])
del words[at - 1 : at + 1]
if os.fork():
    os.execv("/usr/bin/qemu-system-x86_64", ["qemu-system-x86_64", *words, "-qmp", "unix:monitor,server=on,wait=off"])
until = time.monotonic() + 100
while True:
    try:
        monitor = socket.socket(socket.AF_UNIX)
        monitor.connect("monitor")
        break
    except OSError:
        assert time.monotonic() < until
        time.sleep(0.05)
lines = monitor.makefile("rw")
def call(command, **arguments):
    lines.write(json.dumps({{"execute": command, "arguments": arguments}}) + "\\n")
    lines.flush()
    while "return" not in (answer := json.loads(lines.readline())):
        assert "error" not in answer, answer
    return answer["return"]
lines.readline()
call("qmp_capabilities")
while not all(disk["stats"]["rd_operations"] for disk in call("query-blockstats")):
    time.sleep(0.05)
# Long enough for a machine that does not wait.
time.sleep(1)
call("device_add", driver="virtserialport", **options)
"""


def test_a_port_that_appears_late_is_waited_for(coldrise, runtime, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello").write_text("hello")
    coldrise.backup("web01", vda=filesystems.ext4(tmp_path / "vda", tree, 16 * MIB))
    program = tmp_path / "bin" / "qemu-system-x86_64"
    program.parent.mkdir()
    program.write_text(WRAPPER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin:/usr/sbin:/sbin")
    assert names(files(coldrise, "ls", "web01/latest:/")) == ["hello", "lost+found"]
    assert content(coldrise, "web01/latest:/hello", "--once") == b"hello"
