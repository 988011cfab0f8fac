#!/bin/bash
# Builds a small bootable Debian 12 guest: one raw disk image with a DOS partition
# table, GRUB and one ext4 file system. It gives a login prompt on ttyS0 (root, no
# password) and holds fio, nbd-client and nfs-common.
#
#   build.sh            build, or find in the cache; print the image's path
#   build.sh OUTPUT     the same, then copy the image (sparse) to OUTPUT
#
# GUEST_RECIPE names another folder with guest-packages.txt and customize.sh, whose image
# keeps that folder's name; boot.cfg and rootfs are this one's.
#
# The cache is ${COLDRISE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/coldrise}; the file
# there is named after a hash of the recipe, so a changed recipe is a new image.
# The last line of standard output is the path; everything else goes to standard
# error. No loop device is used, so it runs in a container; it needs root.
set -euo pipefail

base=$(dirname "$(readlink -f "$0")")
recipe=${GUEST_RECIPE:-$base}
suite=bookworm
disk_size=2G
partition_start_sector=2048
export ROOT_UUID=c01d215e-0000-4000-8000-000000000001
disk_label=0xc01d215e
# Every time stamp that the tools would take from the clock.
export SOURCE_DATE_EPOCH=1764547200

say() { printf '%s image: %s\n' "${recipe##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

recipe_hash() {
    local folder
    for folder in "$base" "$recipe"; do
        (cd "$folder" && find . -type f ! -name '.*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum)
    done | sha256sum | cut -c1-16
}

check_machine() {
    local tool
    for tool in mmdebstrap mke2fs sfdisk grub-mkimage apt-get; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null ||
            die "the program $tool is missing: apt-get install $(tr '\n' ' ' <"$base/packages.txt")"
    done
    [ "$(id -u)" = 0 ] || die "building needs root (mmdebstrap sets up a file system tree): run it with sudo"
}

# The files among this machine's apt sources that name Debian's own archive (or the
# mirror that stands in for it here): mmdebstrap takes them whole, keys and options
# included, and so reaches everything that this machine reaches.
debian_sources() {
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(ORIGIN) $(SOURCESENTRY)' |
        awk -v suite="$suite" '
            $2 == "main" && ($3 == "Debian" || $3 == "$(ORIGIN)") &&
            ($1 == suite || $1 == suite "-updates" || $1 == suite "-security") {
                sub(/:[0-9]+$/, "", $4); print $4
            }' | sort -u
}

# How this machine's apt fetches: proxies, certificates, retries.
fetch_settings() {
    apt-config dump | grep -E '^Acquire::(https?(::|-)|ftp::|Check-|Retries|Max-)' || true
}

build_tree() {
    local tree=$1 sources=()
    mapfile -t sources < <(debian_sources)
    [ ${#sources[@]} -gt 0 ] ||
        die "no apt source of this machine offers Debian $suite main: add one to /etc/apt/sources.list.d"
    fetch_settings >"$work/apt.conf"
    say "installing packages from ${sources[*]}"
    mmdebstrap --quiet --variant=minbase --architectures=amd64 \
        --aptopt="$work/apt.conf" \
        --aptopt='Acquire::Languages "none"' \
        --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='force-unsafe-io' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/info/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --include="$(paste -sd, "$recipe/guest-packages.txt")" \
        --customize-hook="$recipe/customize.sh \"\$1\"" \
        "$suite" "$tree" "${sources[@]}" >&2 ||
        die "mmdebstrap failed (its messages are above): check that apt-get update works on this machine"
}

# The tree becomes a file system inside the disk file, at the partition's offset.
write_file_system() {
    local disk=$1 tree=$2
    truncate -s "$disk_size" "$disk"
    printf 'label: dos\nlabel-id: %s\nstart=%d, type=83, bootable\n' \
        "$disk_label" "$partition_start_sector" | sfdisk --quiet "$disk" >&2
    local blocks=$((($(stat -c %s "$disk") - partition_start_sector * 512) / 4096))
    E2FSPROGS_FAKE_TIME=$SOURCE_DATE_EPOCH mke2fs -q -F -t ext4 -b 4096 -m 1 \
        -L coldrise-guest -U "$ROOT_UUID" -d "$tree" \
        -E "offset=$((partition_start_sector * 512)),hash_seed=$ROOT_UUID,lazy_itable_init=0" \
        "$disk" "$blocks" >&2
}

# GRUB's first stage looks for the core image in the very next sector, and the core
# image knows its own length; so two copies do what grub-install would do on a
# mounted disk. The partition table in the last 72 bytes of sector 0 stays.
write_boot_loader() {
    local disk=$1 grub=/usr/lib/grub/i386-pc core_bytes
    sed "/^#/d; s/@ROOT_UUID@/$ROOT_UUID/" "$base/boot.cfg" >"$work/boot.cfg"
    grub-mkimage -O i386-pc -p '(,msdos1)/boot/grub' -c "$work/boot.cfg" -o "$work/core.img" \
        biosdisk part_msdos ext2 linux16 boot serial terminal
    core_bytes=$(stat -c %s "$work/core.img")
    [ "$core_bytes" -le $(((partition_start_sector - 1) * 512)) ] ||
        die "the boot loader ($core_bytes bytes) does not fit before the partition"
    dd if="$grub/boot.img" of="$disk" bs=1 count=440 conv=notrunc status=none
    dd if="$work/core.img" of="$disk" bs=512 seek=1 conv=notrunc status=none
}

build() {
    check_machine
    mkdir -p "$cache" || die "cannot create the cache folder $cache: set COLDRISE_CACHE to a writable one"
    work=$(mktemp -d "$cache/${recipe##*/}-build.XXXXXX")
    trap 'rm -rf --one-file-system "$work"' EXIT
    # mmdebstrap's child processes are not root in every mode: let them pass.
    chmod 755 "$work"
    build_tree "$work/tree"
    say "writing the disk"
    write_file_system "$work/disk.raw" "$work/tree"
    write_boot_loader "$work/disk.raw"
    mv "$work/disk.raw" "$image"
    say "built in $SECONDS s, $(du -m "$image" | cut -f1) MiB used"
}

[ $# -le 1 ] || die "usage: build.sh [OUTPUT]"
cache=${COLDRISE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/coldrise}
image=$cache/${recipe##*/}-$(recipe_hash).raw
if [ -f "$image" ]; then say "found in the cache"; else build; fi
if [ $# = 1 ]; then
    cp --sparse=always "$image" "$1"
    image=$1
fi
printf '%s\n' "$image"
