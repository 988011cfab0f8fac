"""The limit of encrypted writes: an nbdkit plugin that only encrypts and writes (encrypting_file.c)."""

from __future__ import annotations

import re
from pathlib import Path

from .commands import run
from .figures import Failure
from .servers import Server
from .setting import Setting

ENCRYPTING = "nbdkit, encrypting"


def encrypting_plugin(setting: Setting) -> Path | None:
    """The built plugin; `None`, with the reason among what is left out, where it cannot be built."""
    try:
        return _built(setting)
    except Failure as error:
        setting.left_out[ENCRYPTING] = " ".join(str(error).split())
        setting.say(f"  {ENCRYPTING} is left out: {error}")
        return None


def _built(setting: Setting) -> Path:
    """With the cipher of Coldrise's own library, whose version is part of its symbols."""
    if setting.program is None:
        raise Failure("no coldrise program, whose cipher it uses")
    library = setting.program.parent / "libcoldrise_capi.a"
    symbols = run(["nm", "--defined-only", "--extern-only", "--quiet", library])
    prefix = re.search(r"(\w+_)EVP_AEAD_CTX_seal_scatter$", symbols, re.MULTILINE)
    if prefix is None:
        raise Failure(f"{library}: has no EVP_AEAD_CTX_seal_scatter")
    plugin = setting.work / "encrypting_file.so"
    source = setting.project / "bench" / "support" / "encrypting_file.c"
    run(["gcc", "-O2", "-Wall", "-fPIC", "-shared", f"-DPREFIXED(name)={prefix[1]}##name", "-o", plugin,
         *run(["pkg-config", "--cflags", "nbdkit"]).split(), source, library, "-Wl,--gc-sections"])
    return plugin


def nbdkit_encrypting(plugin: Path, image: Path, socket_path: Path) -> Server:
    """On a raw image, or on those of a folder; their names are those of the exports."""
    source = f"dir={image}" if image.is_dir() else f"file={image}"
    return Server(["nbdkit", "--foreground", "--exit-with-parent", "--unix", socket_path, plugin, source], socket_path)
