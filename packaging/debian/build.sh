#!/bin/bash
# Builds the Debian package from the built programs. Runs without root.
#
#   build.sh OUTPUT.deb VERSION
#
# BUILD_DIR names the folder of the built programs (default: target/release).
set -euo pipefail

[ $# = 2 ] || { echo "usage: build.sh OUTPUT.deb VERSION" >&2; exit 2; }
output=$(realpath -m "$1")
version=$2
top=$(dirname "$(readlink -f "$0")")/../..
cd "$top"
architecture=$(dpkg --print-architecture)
multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
umask 022

make --no-print-directory --silent install-files DESTDIR="$root" PREFIX=/usr LIBDIR="/usr/lib/$multiarch" \
    BUILD_DIR="${BUILD_DIR:-target/release}"

documents=$root/usr/share/doc/coldrise
install -D -m 644 -t "$documents" packaging/debian/copyright README.md SECURITY.md CHANGELOG.md
install -D -m 644 -t "$documents/docs" docs/*.md docs/*.svg docs/*.png
printf 'coldrise (%s) bookworm; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- %s  %s\n' "$version" \
    "$(sed -n 's/^Maintainer: //p' packaging/debian/control.in)" "$(date -R -r CHANGELOG.md)" |
    gzip -9 -n >"$documents/changelog.gz"
find "$root/usr/share/man" -type f -exec gzip -9 -n {} +

# Line tables stay out of the package; a panic still names its function. The kernel of the machine that
# reads file systems stays as Debian built it.
find "$root/usr/bin" "$root/usr/lib/$multiarch" -type f ! -name "coldrise-files-*" -exec strip --strip-unneeded --remove-section=.comment {} +

# The libraries of the FSAL come with nfs-ganesha, which is suggested only.
mkdir -p "$work/debian" "$root/DEBIAN"
printf 'Source: coldrise\n\nPackage: coldrise\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O "$root"/usr/bin/* "$root/usr/lib/$multiarch"/nbdkit/plugins/* 2>"$work/warnings") ||
    { cat "$work/warnings" >&2; exit 1; }
depends=${depends#shlibs:Depends=}
size_kib=$(du -sk "$root" | cut -f1)
sed -e "s|@VERSION@|$version|; s|@ARCHITECTURE@|$architecture|; s|@SIZE_KIB@|$size_kib|" \
    -e "s/@DEPENDS@/$depends/" packaging/debian/control.in >"$root/DEBIAN/control"
echo /etc/default/coldrise >"$root/DEBIAN/conffiles"
install -m 755 -t "$root/DEBIAN" packaging/debian/{postinst,prerm,postrm}
(cd "$root" && find . -type f ! -path './DEBIAN/*' ! -path './etc/*' -printf '%P\0' | LC_ALL=C sort -z |
    xargs -0 md5sum) >"$root/DEBIAN/md5sums"
chmod 644 "$root/DEBIAN/md5sums"

mkdir -p "$(dirname "$output")"
dpkg-deb --root-owner-group --build "$root" "$output" >&2
