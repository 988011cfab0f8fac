"""The headers that layouts put around a disk equal images/golden, byte for byte."""

import subprocess
import sys

from support.cli import ROOT

GOLDEN = ROOT / "images" / "golden"


def test_headers_match_the_published_ones(tmp_path):
    # Images are copied, mounted and attached for years: ids and places must not
    # change by accident from one version to the next.
    done = subprocess.run([sys.executable, GOLDEN / "generate.py", tmp_path],
                          capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".py")
    assert kept == sorted(path.name for path in tmp_path.iterdir())
    for name in kept:
        assert (tmp_path / name).read_text() == (GOLDEN / name).read_text(), name
    assert "VMFS" in (GOLDEN / "vmdk-esxi.hex").read_text()
