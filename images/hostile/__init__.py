"""Images that are made to harm whoever imports them, written by `CASES[n].write`.

    python3 -m hostile list             the table, in the folder images/
    python3 -m hostile FOLDER           writes them all

Standard library only; nothing binary is kept in the repository.
"""

from . import qcow2, raw, vhd, vhdx, vmdk

CASES = [*qcow2.CASES, *vmdk.CASES, *vhd.CASES, *vhdx.CASES, *raw.CASES]
