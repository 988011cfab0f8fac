#!/bin/sh
# Last step inside mmdebstrap: turns the installed packages into this guest.
# Called as customize.sh ROOT_DIRECTORY, with ROOT_UUID in the environment.
set -eu
root=$1
recipe=$(dirname "$(readlink -f "$0")")

# Root logs in with no password: the console is the only way in.
chroot "$root" passwd --quiet --delete root

rm -rf "$root/etc/apt/sources.list" "$root/etc/apt/sources.list.d" \
    "$root/etc/apt/apt.conf.d/99mmdebstrap" "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap"
cp -R --no-preserve=ownership,timestamps "$recipe/rootfs/." "$root/"
sed -i "s/@ROOT_UUID@/$ROOT_UUID/" "$root/etc/fstab"

chroot "$root" systemctl --root=/ --quiet enable systemd-networkd.service serial-getty@ttyS0.service
chroot "$root" systemctl --root=/ --quiet set-default multi-user.target

# Everything here costs boot time or writes to the disk at hours of its own, and
# nothing in the tests needs it. rpc.statd and rpcbind still start when asked for.
chroot "$root" systemctl --root=/ --quiet disable nfs-client.target rpcbind.service rpcbind.socket \
    nbd-client.service nfs-common.service remote-fs.target 2>/dev/null || true
chroot "$root" systemctl --root=/ --quiet mask \
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer \
    e2scrub_all.timer e2scrub_reap.service systemd-tmpfiles-clean.timer \
    getty@tty1.service getty-static.service systemd-logind.service \
    systemd-networkd-wait-online.service systemd-network-generator.service \
    systemd-journal-flush.service systemd-update-utmp.service \
    systemd-update-utmp-runlevel.service systemd-pstore.service systemd-binfmt.service \
    systemd-sysusers.service systemd-update-done.service ldconfig.service \
    systemd-machine-id-commit.service systemd-firstboot.service \
    systemd-hwdb-update.service systemd-boot-system-token.service \
    systemd-random-seed.service systemd-user-sessions.service kmod-static-nodes.service \
    systemd-modules-load.service nbd-client.service nfs-common.service \
    systemd-ask-password-console.path systemd-ask-password-wall.path \
    run-rpc_pipefs.mount nfs-client.target \
    dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    sys-kernel-config.mount sys-fs-fuse-connections.mount \
    modprobe@configfs.service modprobe@drm.service modprobe@efi_pstore.service \
    modprobe@fuse.service modprobe@dm_mod.service modprobe@loop.service \
    proc-sys-fs-binfmt_misc.automount
# Without systemd-user-sessions.service this ban on logins stays.
mkdir -p "$root/etc/tmpfiles.d"
ln -s /dev/null "$root/etc/tmpfiles.d/systemd-nologin.conf"
# Only the generator for fstab is needed here.
mkdir -p "$root/etc/systemd/system-generators"
for generator in "$root"/usr/lib/systemd/system-generators/*; do
    name=${generator##*/}
    [ "$name" = systemd-fstab-generator ] ||
        ln -s /dev/null "$root/etc/systemd/system-generators/$name"
done

# The root file system is on a plain partition: no part of the initramfs that other
# packages bring (device mapper, NBD roots, resume, udev) is of use.
for name in dmsetup nbd nbd-client udev resume thermal keymap; do
    find "$root/usr/share/initramfs-tools" -name "$name" -type f -delete
done
chroot "$root" update-initramfs -u >&2

# Nothing below is read by a running guest, and it only makes the image larger.
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old \
    "$root"/var/cache/ldconfig/aux-cache "$root"/var/log/* "$root"/usr/share/locale/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/*
