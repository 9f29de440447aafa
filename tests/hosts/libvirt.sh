#!/usr/bin/env bash
# libvirt.sh BASE CMD…: starts libvirt's daemons in a box, waits until they answer, and becomes CMD.
set -euo pipefail
base=$1
shift

daemon() {
    (cd / && exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        setsid "$@" </dev/null >>"$base/${1}.log" 2>&1) &
}

daemon virtlogd
daemon libvirtd
deadline=$((SECONDS + 60))
until virsh -q -r -c qemu:///system uri >/dev/null 2>&1; do
    ((SECONDS < deadline)) || {
        cat "$base/libvirtd.log" >&2
        exit 5
    }
    sleep 0.1
done
exec "$@"
