"""Repositories that several tests need alike: made once, and copied for each."""

import shutil


def become(coldrise, prepared):
    """The fresh repository becomes a copy of the one at `prepared`."""
    shutil.rmtree(coldrise.repository)
    shutil.copytree(prepared, coldrise.repository)
