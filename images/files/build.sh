#!/bin/bash
# Builds the machine that reads file systems: Debian's cloud kernel, and an initial file system with
# our own init, the kernel's modules for file systems and volumes, and four of Debian's programs.
#
#   build.sh INIT KERNEL INITRD
#
# INIT is our static program; KERNEL and INITRD are the files to make. The packages come from this machine's apt sources
# and are kept in build/files/packages. Nothing is installed; it runs without root.
set -euo pipefail

[ $# = 3 ] || { echo "usage: build.sh INIT KERNEL INITRD" >&2; exit 2; }
init=$(readlink -f "$1")
kernel=$(realpath -m "$2")
initrd=$(realpath -m "$3")
recipe=$(dirname "$(readlink -f "$0")")
packages=$recipe/../../build/files/packages
export LC_ALL=C SOURCE_DATE_EPOCH=1764547200

die() { echo "files image: $*" >&2; exit 1; }
for tool in cpio zstd apt-get dpkg-deb readelf objcopy strip; do
    command -v "$tool" >/dev/null || die "the program $tool is missing: run make build-deps"
done

# Lists packages' versions, so that only changed ones are fetched.
fetch() {
    local image name version file
    image=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
    [ -n "$image" ] || die "no apt source of this machine offers linux-image-cloud-amd64: run apt-get update"
    mkdir -p "$packages"
    (cd "$packages"
    apt-cache show --no-all-versions "$image" $(cat "$recipe/packages.txt") |
        awk '/^Package: / {name = $2} /^Version: / {gsub(":", "%3a", $2); print name, name "_" $2 "_amd64.deb"}' >"$work/wanted"
    [ "$(wc -l <"$work/wanted")" = $(($(wc -l <"$recipe/packages.txt") + 1)) ] ||
        die "no apt source of this machine offers some of images/files/packages.txt: run apt-get update"
    while read -r name file; do
        [ -f "$file" ] || printf '%s\n' "$name"
        printf '%s\n' "$file" >>"$work/files"
    done <"$work/wanted" >"$work/missing"
    # As root, apt warns that it cannot drop its privileges here.
    [ ! -s "$work/missing" ] || xargs -d '\n' apt-get download -q <"$work/missing" 2>"$work/messages" >&2 ||
        { cat "$work/messages" >&2; exit 1; })
}

# Copies a program and the libraries it needs, which all have to be in the packages.
add_program() {
    local file=$1 needed library found
    [ ! -e "$root/bin/${file##*/}" ] || return 0
    install -D -m 755 "$file" "$root/$2/${file##*/}"
    strip --strip-unneeded "$root/$2/${file##*/}"
    needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    for library in $needed; do
        [ ! -e "$root/lib/$library" ] || continue
        found=$(find "$work/tree" -name "$library" | head -n 1)
        [ -n "$found" ] || die "${file##*/} needs $library, which no package of packages.txt has"
        add_program "$(readlink -f "$found")" lib
        [ -e "$root/lib/$library" ] || mv "$root/lib/$(basename "$(readlink -f "$found")")" "$root/lib/$library"
    done
}

# The names of the modules that a module needs, in the order in which they are loaded.
needs() {
    local module
    for module in $(objcopy -O binary --only-section=.modinfo "$(module_file "$1")" /dev/stdout |
        tr '\0' '\n' | sed -n 's/^depends=//p' | tr , ' '); do
        needs "$module"
        echo "$module"
    done
}

# In names of modules, _ and - are the same.
module_file() {
    find "$work/tree/lib/modules" -name "${1//[-_]/[-_]}.ko" | head -n 1
}

add_modules() {
    local name file needed module
    for name in $(cat "$recipe/modules.txt"); do
        file=$(module_file "$name")
        [ -n "$file" ] || die "the kernel has no module $name"
        needed=$(needs "$name" | awk '!seen[$0]++' | paste -sd ' ')
        echo "$name: $needed" >>"$root/modules/list"
        for module in $name $needed; do
            [ -e "$root/modules/$module.ko" ] || strip --strip-debug -o "$root/modules/$module.ko" "$(module_file "$module")"
        done
    done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,lib,lib64,modules,proc,sys,dev,run,etc} "$work/tree"
fetch
while read -r file; do
    dpkg-deb --fsys-tarfile "$packages/$file" |
        tar -x -C "$work/tree" --wildcards --no-wildcards-match-slash --exclude='./usr/share' --exclude='./usr/lib/*/gconv' --exclude='*/kernel/sound' --exclude='*/kernel/net'
done <"$work/files"
install -m 755 "$init" "$root/init"
strip "$root/init"
for program in sbin/lvm sbin/cryptsetup sbin/mdadm bin/ntfs-3g; do
    add_program "$(find "$work/tree" -path "*/$program" | head -n 1)" bin
done
ln -s ../lib/ld-linux-x86-64.so.2 "$root/lib64/ld-linux-x86-64.so.2"
add_modules
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
(cd "$root" && find . -print0 | sort -z | cpio --quiet --null --create --format=newc --owner=0:0 --reproducible) |
    zstd -q -9 -T0 >"$initrd.new"
install -m 644 "$(find "$work/tree/boot" -name 'vmlinuz-*')" "$kernel.new"
mv "$kernel.new" "$kernel"
mv "$initrd.new" "$initrd"
