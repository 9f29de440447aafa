#!/usr/bin/env bash
# box.sh NAME BASE SEED [CMD…]: the first process of a box; it makes the namespace a host of its own, runs CMD and reaps.
#
# Runs as PID 1 of fresh pid, mount, net, uts and cgroup namespaces. What outlives a power-off is in BASE/NAME/disk, what
# boxes share (wrapper, libvirt's capability cache, guest image) in SEED. Nothing of the machine's own is written.
set -euo pipefail
name=$1 base=$2 seed=$3
shift 3
[ $# -gt 0 ] || set -- sleep infinity
disk=$base/$name/disk

mount --make-rprivate /
for netns in /run/netns/*; do # other tests' namespaces: they vanish from here when those end
    umount -l "$netns" 2>/dev/null || :
done
hostname "$name"
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/libvirt /run/netns /run/virtbus /run/virtbus-seed
mount --bind "$seed" /run/virtbus-seed # it may be a folder that the next lines hide

# Each a folder of this box's own, also after it was powered off and on.
for dir in var/lib/virtbus var/lib/libvirt var/log/libvirt var/cache/libvirt var/lib/cni etc/libvirt etc/virtbus; do
    [ -d "/$dir" ] || continue
    mkdir -p "$disk/$dir"
    mount --bind "$disk/$dir" "/$dir"
done
for dir in libexec images/src; do
    [ -d "/run/virtbus-seed/$dir" ] || continue
    mkdir -p "/var/lib/virtbus/$dir"
    mount --bind "/run/virtbus-seed/$dir" "/var/lib/virtbus/$dir"
done
umount /run/virtbus-seed
mv /run/virtbus-seed /run/virtbus-box # tests/e2e/host.py looks for it

# The machine's sysfs shows the machine's links; cgroups begin at this box.
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
while IFS=: read -r id controllers _; do
    if [ "$id" = 0 ]; then
        mkdir /sys/fs/cgroup/unified
        mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    else
        mkdir "/sys/fs/cgroup/${controllers#name=}"
        option=$controllers
        [ "$controllers" = "${controllers#name=}" ] || option=none,$controllers
        mount -t cgroup -o "$option" cgroup "/sys/fs/cgroup/${controllers#name=}"
    fi
done </proc/self/cgroup

ip link set lo up
touch "$base/$name/up"
exec tini -- "$@"
