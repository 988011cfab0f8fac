#!/bin/bash
# Builds fio with its NFS and iSCSI engines, which Debian's fio lacks, from Debian's source of it.
#
#   build-fio.sh FOLDER     prints the program's path: FOLDER/fio-VERSION/fio
#
# Downloads and build results stay in FOLDER, for the next run.
set -euo pipefail

folder=$(realpath -m "$1")
suite=${FIO_SUITE:-bookworm}
mirror=${FIO_MIRROR:-http://deb.debian.org/debian}

mkdir -p "$folder"/apt/{lists,cache/archives}/partial
built=$(find "$folder" -mindepth 2 -maxdepth 2 -name fio -type f -executable | head -n 1)
if [ -n "$built" ] && ! "$built" --enghelp | grep -qw libiscsi; then
    # From before it had iSCSI.
    built=
fi
if [ -z "$built" ]; then
    # A deb-src line for this call alone, with lists of its own.
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" \
        > "$folder/apt/sources.list"
    options=(-o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache"
        -o APT::Sandbox::User= -qq)
    cd "$folder"
    apt-get "${options[@]}" update
    apt-get "${options[@]}" source --tar-only fio
    tar -xf fio_*.orig.tar.*
    cd "$(find . -mindepth 1 -maxdepth 1 -name 'fio-*' -type d)"
    { ./configure --enable-libnfs --enable-libiscsi --disable-native && make -j2; } > ../build.log 2>&1 ||
        { tail -n 20 ../build.log >&2; exit 1; }
    for library in LIBNFS LIBISCSI; do
        grep -q "CONFIG_$library" config-host.mak || { echo "fio was built without $library" >&2; exit 1; }
    done
    built=$PWD/fio
fi >&2
echo "$built"
