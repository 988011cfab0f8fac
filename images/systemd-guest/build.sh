#!/bin/bash
# Builds a Debian 12 guest for the test of the package: systemd, D-Bus and polkit run, and what the
# package depends on is installed, so that the guest works without a network. Otherwise as images/guest.
recipe=$(dirname "$(readlink -f "$0")")
GUEST_RECIPE=$recipe exec "$recipe/../guest/build.sh" "$@"
