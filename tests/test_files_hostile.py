"""coldrise files: damaged file systems, and a compromised machine."""

import pathlib
import random
import stat

import pytest

from support import filesystems
from test_files import MIB, files, machines, names, runtime

__all__ = ["runtime"]

# In place of QEMU: it answers the greeting, then what BODY says. It is confined like QEMU.
FAKE = """#!{python} -IS
import socket, struct, sys
path = next(word.split("path=")[1].split(",")[0] for word in sys.argv if "path=" in word)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
while True:
    client, _ = listener.accept()
    greeting = b""
    try:
        while len(greeting) < 24:
            greeting += client.recv(24 - len(greeting))
        {before}
        client.sendall(greeting)
        while True:
            length = struct.unpack("<I", client.recv(4, socket.MSG_WAITALL))[0]
            request = client.recv(length, socket.MSG_WAITALL)
            {body}
    except (OSError, struct.error):
        pass
"""

FRAMES = r"""
            def field(value): return struct.pack("<I", len(value)) + value
            def frame(body): return struct.pack("<I", len(body)) + body
            def entry(path, kind, size=0, target=b""):
                return frame(b"\2" + field(path) + struct.pack("<7Q", kind, 0o644, 0, 0, size, 0, 0) + field(target))
            device = b"\0" + struct.pack("<3Q", 0, 1, 0) + field(b"") + field(b"ext4") + field(b"") + \
                struct.pack("<2Q", MIB, 1) + field(b"")
            answers = {0: frame(device) + frame(b"\5"), 1: frame(b"\1" + bytes(8)) + frame(b"\5")}
            client.sendall(answers.get(request[0], b""))
            if request[0] in answers: continue
""".replace("MIB", str(MIB))


@pytest.fixture
def machine(coldrise, runtime, tmp_path, monkeypatch):
    """Puts a program in QEMU's place that answers like this."""
    coldrise.backup("web01", vda=filesystems.empty(tmp_path / "vda", MIB))

    def fake(body, before="pass"):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "qemu-system-x86_64"
        program.write_text(FAKE.format(python="/usr/bin/python3", body=body.strip(), before=before))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin:/usr/sbin:/sbin")

    yield fake
    assert not machines(runtime) and coldrise.json("sessions") == {"sessions": []}


NONSENSE = {
    "an endless greeting": ("pass", "while True: client.sendall(bytes(1 << 20))"),
    "an overlong message": ("client.sendall(b'\\xff' * 4)", "pass"),
    "a malformed message": ("client.sendall(struct.pack('<I', 3) + b'abc')", "pass"),
    "an empty message": ("client.sendall(bytes(4))", "pass"),
    "endless devices": (FRAMES.replace("client.sendall(answers", "while True: client.sendall(frame(device))\n"
                                       "            client.sendall(answers"), "pass"),
    "a name that leads out": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'../x', 0))", "pass"),
    "an absolute name": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'/etc/x', 0))", "pass"),
    "a file below a link": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'a', 2, 0, b'/etc') +"
                            " entry(b'a/b', 0))", "pass"),
    "a name twice": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'a', 2, 0, b'b') + entry(b'a', 1))",
                     "pass"),
    "too much content": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'a', 0, 3) +"
                         " frame(b'\\3' + field(bytes(4))))", "pass"),
    "endless empty content": (FRAMES + "            client.sendall(entry(b'', 1) + entry(b'a', 0, 3) +"
                              " frame(b'\\3' + field(b'')))", "pass"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_invalid_input_ends_in_an_error(coldrise, machine, tmp_path, case):
    machine(*NONSENSE[case])
    target = tmp_path / "target"
    error = files(coldrise, "get", "web01/latest:vda/", target, status=1)["error"]
    assert error["kind"] == "tool_failed" and "nothing of it can be trusted" in error["message"], error
    assert not target.exists()


ENDS = {
    "a crash of its kernel": (
        "print('one\\ntwo\\n[ 1.0] Kernel \\x1b[31mpanic - not syncing: Fatal exception\\nCall Trace', flush=True);"
        " sys.exit(0)", "crashed (one / two / [ 1.0] Kernel panic - not syncing: Fatal exception): a damaged"),
    "a kill by this host": ("import os; os.kill(os.getpid(), 9)", "ended (signal: 9 (SIGKILL)): this host has killed it"),
    "a failure of QEMU": ("print('no thread', file=sys.stderr, flush=True); sys.exit(3)",
                          "ended (exit status: 3): no thread"),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_machine_is_reported_with_its_reason(coldrise, machine, case):
    body, said = ENDS[case]
    machine(body)
    error = files(coldrise, "ls", "web01/latest:vda/", status=1)["error"]
    assert error["kind"] == "tool_failed" and said in error["message"], error
    # Of each point it says what could not be read.
    assert said in str(files(coldrise, "versions", "web01:/etc/fstab", status=1))


def test_a_huge_file_does_not_fill_this_host(coldrise, machine, tmp_path):
    machine(FRAMES + "            client.sendall(entry(b'', 0, 1 << 60))")
    target = tmp_path / "target"
    error = files(coldrise, "get", "web01/latest:vda/file", target, status=1)["error"]
    assert "--max-size" in error["message"] and not target.exists()
    files(coldrise, "ls", "web01/latest:", "--once")


def test_a_damaged_file_system_ends_in_an_error(coldrise, runtime, tmp_path):
    """Random bytes in the metadata: an error or an answer, and nothing is left."""
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    for number in range(200):
        (tree / f"etc/file{number}").write_text("x" * number)
    image = filesystems.ext4(tmp_path / "good", tree, 16 * MIB)
    good, chance = image.read_bytes(), random.Random(5)
    disks = {}
    for number in range(6):
        damaged = bytearray(good)
        # The superblock's first bytes stay, so that it is recognised.
        for _ in range(2000):
            damaged[chance.randrange(1100, 2 * MIB)] = chance.randrange(256)
        disks[f"vd{'abcdef'[number]}"] = path = tmp_path / f"damaged{number}"
        path.write_bytes(damaged)
    address = coldrise.backup("web01", **disks)
    outcomes = []
    for name in disks:
        done = coldrise.run("--json", "files", "get", f"{address}:{name}/", tmp_path / f"{name}.tar", timeout_s=300)
        assert done.returncode in (0, 1), done.stderr
        assert done.returncode == 0 or "coldrise: " in done.stderr
        outcomes.append(done.returncode)
    assert 1 in outcomes
    files(coldrise, "ls", f"{address}:", "--once")
    assert coldrise.json("sessions") == {"sessions": []} and not machines(runtime)


def test_a_folder_with_a_slash_in_a_name_is_reported(coldrise, runtime, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "good").write_text("good")
    (tree / "XXXevil").write_text("evil")
    image = filesystems.ext4(tmp_path / "vda", tree, 16 * MIB, "-O", "^metadata_csum,^dir_index")
    image.write_bytes(image.read_bytes().replace(b"XXXevil", b"../evil"))
    coldrise.backup("web01", vda=image)
    listed = files(coldrise, "ls", "web01/latest:/", "--once", status=1)
    assert listed["unread"] >= 1 and not any("evil" in name for name in names(listed))


def test_missing_programs_are_named(coldrise, point, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("nbdkit", "sh"):
        (tmp_path / "bin" / name).symlink_to(pathlib.Path("/usr/bin") / name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    error = files(coldrise, "ls", "web01/latest:", status=1)["error"]
    assert "apt install qemu-system-x86" in error["message"]
