"""Reads and writes the files of a Kubernetes node for `virtbus cri`."""

import socket
import stat
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

CONTAINERD = "/run/containerd/containerd.sock"
UNITS = ("virtbus-cri", "virtbus-criproxy")
NODE_LABEL = "virtbus.io/vm-pods"

_DRIVER = """\
#!/bin/sh
# The driver virtlet/flexvolume_driver for kubelet, written by `virtbus cri install`.
# It gives the options of a volume to virtbus-cri. They may have secrets, so they stay in memory.
fail() {
    echo "{\\"status\\":\\"Failure\\",\\"message\\":\\"$1\\"}"
    exit 1
}
case ${1-} in
init) echo '{"status":"Success","capabilities":{"attach":false}}' ;;
mount)
    [ $# -eq 3 ] || fail "mount needs a folder and options"
    umask 077
    mkdir -p "$2" || fail "the folder cannot be made"
    mountpoint -q "$2" || mount -t tmpfs -o size=128k,mode=0700 tmpfs "$2" || fail "no tmpfs"
    printf '%s' "$3" >"$2/virtlet-flexvolume.json" || fail "the options cannot be written"
    echo '{"status":"Success"}'
    ;;
unmount)
    [ $# -eq 2 ] || fail "unmount needs a folder"
    while mountpoint -q "$2"; do umount "$2" || fail "the folder is in use"; done
    echo '{"status":"Success"}'
    ;;
*)
    echo '{"status":"Not supported"}'
    exit 1
    ;;
esac
"""
_KUBELET = ("config.yaml", "instance-config.yaml", "kubeadm-flags.env")
"""Files in /var/lib/kubelet. The version of kubeadm decides which file names the
endpoint of the container runtime."""


class HostFiles:
    """The files below `root`: `/`, or a folder in tests."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.runtime_class = root / "etc/virtbus/runtimeclass.yaml"
        self.drop_in = root / "etc/systemd/system/virtbus-criproxy.service.d/container-runtime.conf"
        plugins = root / "usr/libexec/kubernetes/kubelet-plugins/volume/exec"
        self.driver = plugins / "virtlet~flexvolume_driver" / "flexvolume_driver"
        self._answers = root / "var/lib/virtbus/criproxy"
        self._pods = root / "var/lib/virtbus/cri/pods"

    @property
    def systemd(self) -> bool:
        return (self._root / "run/systemd/system").is_dir()

    def missing_units(self) -> list[str]:
        return [unit for unit in UNITS if not self.unit(unit).exists()]

    def unit(self, name: str) -> Path:
        return self._root / "etc/systemd/system" / f"{name}.service"

    @property
    def proxy(self) -> str:
        return self.socket_of("virtbus-criproxy")

    def socket_of(self, unit: str) -> str:
        """Return the path of a service's socket from its settings file, or the default."""
        service = unit.removeprefix("virtbus-")
        given: dict[str, Any] = {}
        with suppress(tomllib.TOMLDecodeError):  # the service itself reports the faulty line
            given = tomllib.loads(_text(self._root / "etc/virtbus" / f"{service}.toml"))
        folder = Path(str(given.get("run_dir") or "/run/virtbus"))
        return str(given.get("listen") or folder / f"{service}.sock")

    def answers(self, path: str) -> bool:
        """Return True if a process accepts connections on a UNIX socket."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2)
            try:
                sock.connect(str(self._root / path.lstrip("/")))
            except OSError:
                return False
        return True

    def write(self, container_runtime: str) -> list[Path]:
        """Write the cluster's objects and the flexvolume driver; return the changed files.

        A `container_runtime` other than containerd's socket also needs a drop-in for the proxy.
        """
        wanted = {self.runtime_class: manifest("virtbus")}
        if container_runtime != CONTAINERD:
            setting = f"VIRTBUS_CONTAINER_RUNTIME={container_runtime}"
            wanted[self.drop_in] = f'[Service]\nEnvironment="{setting}"\n'
        changed = [path for path, text in wanted.items() if _write(path, text)]
        if self._write_driver():
            changed.append(self.driver)
        if self.drop_in not in wanted and _remove(self.drop_in):
            changed.append(self.drop_in)
        return changed

    def _write_driver(self) -> bool:
        """Write the flexvolume driver, if its folder is writable; return True if it changed."""
        with suppress(OSError):  # some hosts have a read-only /usr
            return _write(self.driver, _DRIVER, mode=0o755)
        return False

    def remove(self) -> list[Path]:
        """Remove the files of `write` and the proxy's stored answers; return the removed files."""
        stored = [path for path in sorted(self._answers.rglob("*")) if not path.is_dir()]
        written = (self.runtime_class, self.driver, self.drop_in)
        parts = map(_part, written)
        removed = [path for path in (*written, *parts, *stored) if _remove(path)]
        folders = [path for path in sorted(self._answers.rglob("*")) if path.is_dir()]
        for folder in (*reversed(folders), self._answers, self.drop_in.parent, self.driver.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        return removed

    def vm_pods(self) -> int:
        return len(list(self._pods.glob("*.json")))

    def naming_proxy(self) -> list[str]:
        """Return the files and running kubelets that name the proxy as kubelet's runtime."""
        names = [self._root / "var/lib/kubelet" / name for name in _KUBELET]
        named = [str(path) for path in names if self.proxy in _text(path)]
        running = [f"the running kubelet (pid {pid})" for pid in self._kubelets()]
        return named + running

    def endpoint_file(self) -> str:
        """Return kubeadm's file with kubelet's endpoint; empty if no file has the endpoint."""
        names = [self._root / "var/lib/kubelet" / name for name in _KUBELET]
        has = ("containerRuntimeEndpoint", "container-runtime-endpoint")
        found = [path for path in reversed(names) if any(word in _text(path) for word in has)]
        return str(found[0]) if found else ""

    def _kubelets(self) -> Iterator[str]:
        for path in (self._root / "proc").glob("[0-9]*/cmdline"):
            words = _text(path).split("\0")
            if words[0].endswith("kubelet") and any(self.proxy in word for word in words):
                yield path.parent.name


def manifest(name: str) -> str:
    """Return a manifest for a cluster, as YAML."""
    return (files(__package__) / "manifests" / f"{name}.yaml").read_text(encoding="utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _write(path: Path, text: str, *, mode: int = 0o644) -> bool:
    if _text(path) == text and stat.S_IMODE(path.stat().st_mode) == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    part.write_text(text, encoding="utf-8")
    part.chmod(mode)
    part.replace(path)
    return True


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _remove(path: Path) -> bool:
    if not path.exists():
        return False
    path.unlink()
    return True
