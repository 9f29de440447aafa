"""Servers of network disks: each serves one raw file as a pool's only volume, and can be killed."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from virtbus.bus.provisioning.certificate_authority import ensure_ca, ensure_server

DISK_BYTES = 8 * 1024**2
ADDRESS = "127.0.0.1"


class StorageServer:
    """A server in the folder `base`, and the pool in pools.toml that has its one volume."""

    kind = ""
    stalls = False
    """True if QEMU waits for the server, and reports no error; so the guest runs on, and waits."""

    def __init__(self, name: str, base: Path) -> None:
        self.name = name
        """The name of the pool, and of its volume."""
        self.base = base
        self.base.mkdir(parents=True)
        self.base.chmod(0o711)
        self.disk = base / "disk.raw"
        self.disk.write_bytes(bytes(DISK_BYTES))

    @property
    def pool(self) -> str:
        """Return the pool's part of pools.toml."""
        lines = [f"[pools.{self.name}]", f'kind = "{self.kind}"', *self.settings()]
        return "\n".join([*lines, ""])

    def settings(self) -> Sequence[str]:
        """Return the lines of the pool that depend on its kind."""
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve until the end of the context, then kill the server."""
        with subprocess.Popen(self.argv()) as server:
            try:
                yield
            finally:
                server.kill()

    def argv(self) -> Sequence[str]:
        """Return the command of the server."""
        raise NotImplementedError

    def content(self) -> bytes:
        """Return the bytes of the disk, while no guest uses it."""
        return self.disk.read_bytes()


class Nbd(StorageServer):
    """qemu-nbd, for four clients: the guest, the agent's probes, and one more of each."""

    kind = "nbd"
    port = 10809

    def settings(self) -> Sequence[str]:
        volumes = f'volumes = {{ "default.{self.name}" = "one" }}'
        return [f'host = "{ADDRESS}"', f"port = {self.port}", volumes]

    def argv(self) -> Sequence[str]:
        where = ["-b", ADDRESS, "-p", str(self.port), "-e", "4"]
        return ["qemu-nbd", "-t", "-x", "one", "-f", "raw", *where, *self.tls(), str(self.disk)]

    def tls(self) -> Sequence[str]:
        """Return the options of qemu-nbd for TLS."""
        return []


class NbdTls(Nbd):
    """qemu-nbd with certificates: it admits only clients that its CA has certified."""

    port = 10810
    clients = Path("/etc/libvirt/nbd-tls")
    """The folder of the keys of this host's guests, in the host that `in-own-host` makes."""

    def __init__(self, name: str, base: Path) -> None:
        super().__init__(name, base)
        self._keys = base / "server"
        ca = base / "ca"
        ensure_ca(ca)
        for folder, role in ((self._keys, "server"), (self.clients, "client")):
            folder.mkdir()
            ensure_server(ca, base / role, [ADDRESS])
            shutil.copy(ca.with_suffix(".crt"), folder / "ca-cert.pem")
            shutil.copy(base / f"{role}.crt", folder / f"{role}-cert.pem")
            shutil.copy(base / f"{role}.key", folder / f"{role}-key.pem")
        self.clients.chmod(0o755)
        for file in self.clients.iterdir():
            shutil.chown(file, "libvirt-qemu")

    def settings(self) -> Sequence[str]:
        return [*super().settings(), "tls = true"]

    def tls(self) -> Sequence[str]:
        keys = f"tls-creds-x509,id=keys,endpoint=server,verify-peer=on,dir={self._keys}"
        return ["--object", keys, "--tls-creds", "keys"]
