"""A virsh that kills the program that calls it, before or after a certain request."""

import contextlib
import os
import shutil

SCRIPT = """#!/bin/sh
hit=
case " $* " in *{request}*) test -e {done} || hit=1;; esac
if [ $hit ]; then : > {done}; fi
if [ $hit ] && [ {moment} = before ]; then kill -9 $PPID; exit 1; fi
{virsh} "$@"
code=$?
if [ $hit ]; then kill -9 $PPID; fi
exit $code
"""


@contextlib.contextmanager
def killed_at(folder, moment, request):
    """Within it the first virsh whose words contain `request` kills its caller."""
    place = folder / "killing"
    place.mkdir()
    program = place / "virsh"
    done = place / "done"
    program.write_text(SCRIPT.format(request=f"'{request}'", done=done, moment=moment, virsh=shutil.which("virsh")),
                       encoding="utf-8")
    program.chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{place}:{before}"
    try:
        yield
        assert done.exists(), f"nobody asked for {request}"
    finally:
        os.environ["PATH"] = before
        shutil.rmtree(place)
