"""Images that attack the program which imports them, written by `CASES[n].write`.

    python3 -m hostile list             the table, in the folder images/
    python3 -m hostile FOLDER           writes them all

They need only the standard library; the source tree contains no binary images.
"""

from . import qcow2, raw, vhd, vhdx, vmdk

CASES = [*qcow2.CASES, *vmdk.CASES, *vhd.CASES, *vhdx.CASES, *raw.CASES]
