#!/bin/sh
# Runs a command with its temporary files in memory: `tests/in_memory.sh COMMAND...`
#
# Most tests wait for syncs of a drive, which takes longer than all else they do. What a crash or a full
# drive leaves is tested on simulated drives, not on this machine's.
# The file system goes with the command. On the drive as before: without root, with less than 12 GiB of
# available memory, where mounts are forbidden, and if TMPDIR is set.
set -u
kib=$(awk '$1 == "MemAvailable:" { print int($2 / 2) }' /proc/meminfo)
if [ -n "${TMPDIR:-}" ] || [ "$(id -u)" != 0 ] || [ "$kib" -lt $((6 << 20)) ]; then exec "$@"; fi
# Short: addresses of sockets are.
folder=$(mktemp -d /tmp/XXX) || exit
if unshare --mount mount -t tmpfs tests "$folder" 2>/dev/null; then
    # shellcheck disable=SC2016
    unshare --mount sh -c 'mount -t tmpfs -o "size=$1k,mode=1777" tests "$2" && export TMPDIR="$2" && shift 2 && exec "$@"' \
        sh "$kib" "$folder" "$@"
else
    "$@"
fi
status=$?
rmdir "$folder"
exit $status
