"""Servers of network disks: each serves one raw file as a pool's only volume, and can be killed."""

import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from virtbus.bus.provisioning.certificate_authority import ensure_ca, ensure_server

DISK_BYTES = 8 * 1024**2
UP_S = 60
ADDRESS = "127.0.0.1"


def kept(processes: ExitStack, *argv: str | Path) -> None:
    """Run a command, and kill it when `processes` is closed."""
    process = processes.enter_context(subprocess.Popen([str(word) for word in argv]))
    processes.callback(process.kill)


def run(*argv: str | Path) -> str:
    """Return the output of a command."""
    words = [str(word) for word in argv]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def until_done(*argv: str | Path) -> None:
    """Repeat a command until it succeeds."""
    deadline_s = time.monotonic() + UP_S
    while True:
        try:
            run(*argv)
        except subprocess.CalledProcessError as error:
            if time.monotonic() > deadline_s:
                raise AssertionError(error.stderr) from error
            time.sleep(0.2)
        else:
            return


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
        with ExitStack() as processes:
            self.start(processes)
            yield

    def start(self, processes: ExitStack) -> None:
        """Start the server's processes, and return when it serves the volume."""
        raise NotImplementedError

    @property
    def secret(self) -> str:
        """Return the secret of the pool's login; empty without one."""
        return ""

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

    def start(self, processes: ExitStack) -> None:
        where = ["-b", ADDRESS, "-p", str(self.port), "-e", "4"]
        kept(processes, "qemu-nbd", "-t", "-x", "one", "-f", "raw", *where, *self.tls(), self.disk)

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


class WithLogin(StorageServer):
    """A server that asks for a user and a secret."""

    _secret = "n0-such-secret-of-a-real-server"

    def settings(self) -> Sequence[str]:
        file = self.base / "secret"
        file.touch(mode=0o600)
        file.write_text(f"{self.secret}\n", encoding="utf-8")
        return ['user = "virtbus"', f'secret_file = "{file}"']

    @property
    def secret(self) -> str:
        return self._secret


class Iscsi(WithLogin):
    """tgt, with CHAP."""

    kind = "iscsi"
    stalls = True
    target = "iqn.2026-01.org.example:one"
    control = "7"

    def settings(self) -> Sequence[str]:
        volumes = f'volumes = {{ "default.{self.name}" = "{self.target}/1" }}'
        return [f'host = "{ADDRESS}"', volumes, *super().settings()]

    def start(self, processes: ExitStack) -> None:
        portal = f"portal={ADDRESS}:3260"
        kept(processes, "tgtd", "-f", "-C", self.control, "--iscsi", portal)
        until_done(*self._admin("show", "sys"))
        self._new("target", "--tid", "1", "-T", self.target)
        self._new("logicalunit", "--tid", "1", "--lun", "1", "-b", self.disk)
        self._new("account", "--user", "virtbus", "--password", self.secret)
        run(*self._admin("bind", "account"), "--tid", "1", "--user", "virtbus")
        run(*self._admin("bind", "target"), "--tid", "1", "-I", "ALL")

    def _admin(self, doing: str, mode: str) -> Sequence[str]:
        driver = ["-C", self.control, "--lld", "iscsi"]
        return ["tgtadm", *driver, "--op", doing, "--mode", mode]

    def _new(self, mode: str, *argv: str | Path) -> None:
        run(*self._admin("new", mode), *argv)


class Nfs(StorageServer):
    """nfs-ganesha, which serves a folder in user space, and rpcbind."""

    kind = "nfs"
    stalls = True

    user = 1234

    def settings(self) -> Sequence[str]:
        shutil.chown(self.disk, self.user, self.user)
        volumes = f'volumes = {{ "default.{self.name}" = "{self.disk}" }}'
        return [f'host = "{ADDRESS}"', f"user = {self.user}", f"group = {self.user}", volumes]

    def start(self, processes: ExitStack) -> None:
        config = self.base / "ganesha.conf"
        config.write_text(
            "NFS_CORE_PARAM { NFS_Protocols = 3; Enable_NLM = false; Enable_RQUOTA = false; }\n"
            f"EXPORT {{ Export_Id = 1; Path = {self.base}; Pseudo = /disks; Access_Type = RW;"
            " Squash = No_Root_Squash; SecType = sys; Protocols = 3; Transports = TCP;"
            " FSAL { Name = VFS; } }\n",
            encoding="utf-8",
        )
        kept(processes, "rpcbind", "-f", "-w")
        log, pid = self.base / "ganesha.log", self.base / "ganesha.pid"
        kept(processes, "ganesha.nfsd", "-F", "-f", config, "-L", log, "-p", pid)


class Rbd(WithLogin):
    """A Ceph cluster of one monitor and one daemon with the objects."""

    kind = "rbd"
    stalls = True
    port = 3300

    def __init__(self, name: str, base: Path) -> None:
        super().__init__(name, base)
        self._config = str(base / "ceph.conf")
        self._keys = str(base / "keyring")
        self._monitors = str(base / "monmap")
        self._osd_keys = str(base / "osd" / "keyring")
        self._made = False
        self._key = run("ceph-authtool", "--gen-print-key").strip()
        self._make_monitor()

    @property
    def secret(self) -> str:
        return self._key

    def settings(self) -> Sequence[str]:
        volumes = f'volumes = {{ "default.{self.name}" = "vms/one" }}'
        return [f'monitors = ["{ADDRESS}"]', volumes, *super().settings()]

    def _make_monitor(self) -> None:
        own, base = uuid.uuid4(), self.base
        Path(self._config).write_text(
            "[global]\n"
            f"fsid = {own}\nmon host = {ADDRESS}:{self.port}\nkeyring = {self._keys}\n"
            f"run dir = {base}\nadmin socket = {base}/$name.sock\nlog file = {base}/$name.log\n"
            f"mon data = {base}/mon\nosd data = {base}/osd\n"
            "auth cluster required = cephx\nauth service required = cephx\n"
            "auth client required = cephx\n"
            "osd pool default size = 1\nosd pool default min size = 1\n"
            "mon allow pool size one = true\nosd crush chooseleaf type = 0\n"
            "osd pool default pg autoscale mode = off\nmon data avail crit = 1\n"
            "bluestore block size = 1073741824\nosd memory target = 939524096\n"
            "ms bind ipv6 = false\n",
            encoding="utf-8",
        )
        keys = ["ceph-authtool", self._keys, "--gen-key"]
        run("ceph-authtool", "--create-keyring", self._keys)
        run(*keys, "-n", "mon.", "--cap", "mon", "allow *")
        run(*keys, "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *")
        address = f"[v2:{ADDRESS}:{self.port}]"
        made = ["monmaptool", "--create", "--fsid", str(own), "--addv", "a", address]
        run(*made, self._monitors)
        run("ceph-mon", "-c", self._config, "--mkfs", "-i", "a", "--monmap", self._monitors)

    def _ceph(self, *argv: str) -> Sequence[str]:
        return ["ceph", "-c", self._config, "--connect-timeout", "5", *argv]

    def start(self, processes: ExitStack) -> None:
        kept(processes, "ceph-mon", "-c", self._config, "-i", "a", "-f")
        until_done(*self._ceph("status"))
        osd = ["ceph-osd", "-c", self._config, "-i", "0", "--keyring", self._osd_keys]
        if not self._made:
            of_osd = str(uuid.uuid4())
            run(*self._ceph("osd", "new", of_osd))
            (self.base / "osd").mkdir()
            run("ceph-authtool", "--create-keyring", self._osd_keys, "--gen-key", "-n", "osd.0")
            rights = ["mon", "allow profile osd", "osd", "allow *", "-i", self._osd_keys]
            run(*self._ceph("auth", "add", "osd.0", *rights))
            run(*osd, "--monmap", self._monitors, "--mkfs", "--osd-uuid", of_osd)
        kept(processes, *osd, "-f")
        if not self._made:
            self._make_image()
            self._made = True
        until_done("rbd", "-c", self._config, "info", "vms/one")

    def _make_image(self) -> None:
        until_done(*self._ceph("osd", "pool", "create", "vms", "8"))
        until_done("timeout", "20", "rbd", "-c", self._config, "pool", "init", "vms")
        run("rbd", "-c", self._config, "create", "vms/one", "--size", f"{DISK_BYTES}B")
        user = self.base / "user.keyring"
        user.write_text(f"[client.virtbus]\nkey = {self.secret}\n", encoding="utf-8")
        rights = ["mon", "profile rbd", "osd", "profile rbd pool=vms"]
        run(*self._ceph("auth", "add", "client.virtbus", *rights, "-i", str(user)))

    def content(self) -> bytes:
        run("rbd", "-c", self._config, "export", "vms/one", self.base / "exported")
        return (self.base / "exported").read_bytes()
