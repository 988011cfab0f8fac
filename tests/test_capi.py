"""The C ABI: its header and its library work together in a C program."""

import subprocess

import pytest

from support.cli import BUILT, ROOT

pytestmark = pytest.mark.encrypted


def test_a_c_program(coldrise, point, live, tmp_path):
    include = ROOT / "server" / "capi" / "include"
    program = tmp_path / "client"
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes", "-Werror"]
    libraries = ["-lrocksdb", "-lstdc++", "-lgcc_s", "-lpthread", "-ldl", "-lm"]
    built = subprocess.run(
        ["cc", *strict, f"-I{include}", "-o", program, ROOT / "tests" / "capi" / "client.c"]
        + [BUILT / "libcoldrise_capi.a", *libraries],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [program, coldrise.repository, coldrise.passphrase_file, f"{point}/vda", live],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_header_is_valid_c_plus_plus(tmp_path):
    source = tmp_path / "client.cc"
    source.write_text(
        '#include "coldrise-folders.h"\nint main() { return 0; }\n', encoding="utf-8"
    )
    include = ROOT / "server" / "capi" / "include"
    built = subprocess.run(
        ["c++", "-Wall", "-Wextra", "-Werror", f"-I{include}", "-fsyntax-only", source],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert built.returncode == 0, built.stderr
