"""One host whose services are separate processes, as under systemd, each of any version."""

import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.e2e import host as machine
from tests.e2e.platform import _accelerator, until
from tests.hosts.box import ROOT, Boxes, boxes
from tests.hosts.fleet import PORT, READY_S, RUN, SEED, STATE, Fleet, prepare

SERVICES = ("controller", "imaged", "netd", "nodeagent")
NODE = "n1"


class OneHost(Fleet):
    """The host n1: its bus server, its controller and its node's services."""

    def __init__(self, held: Boxes, python: Path, settings: Mapping[str, str]) -> None:
        super().__init__(held, hosts=1, servers=0, environ={})
        self._more = dict(settings)
        self.host = self.hosts[NODE]
        self.urls = f"nats://{self.host.box.address}:{PORT}"
        self.environ["VIRTBUS_SERVER"] = self.urls
        self.python = dict.fromkeys(SERVICES, python)

    def start(self) -> None:
        """Power on and wait until all services are ready."""
        self._creds.mkdir()
        box = self.host.box
        self.host.lay_out()
        box.on()
        box.keep("virtlogd", "virtlogd")
        box.keep("libvirtd", "tini", "-s", "--", "libvirtd")
        until(self.host.libvirt_answers, "libvirtd")
        server = {"VIRTBUS_NODE": NODE, "VIRTBUS_HOST": box.address}
        box.keep("bus", sys.executable, str(ROOT / "deploy/bus_server.py"), environ=server)
        until(box.path(RUN / "node.creds").exists, "the bus")
        for file in box.path(RUN).glob("*.creds"):
            shutil.copy(file, self._creds)
        for service in SERVICES:
            self.run_service(service)
        self.wait_whole(within_s=READY_S)
        self.ask("image.pull", {"ref": "tiny"}, timeout_s=120)
        self.host.quiet = self.host.census()

    def run_service(self, service: str) -> None:
        """Start a service with its current interpreter."""
        argv = (str(self.python[service]), "-m", f"virtbus.{service}")
        self.host.box.keep(service, *argv, environ=self._settings(service))

    def _settings(self, service: str) -> Mapping[str, str]:
        user = "controller" if service == "controller" else f"node-{NODE}"
        return {
            "VIRTBUS_NODE": NODE,
            "VIRTBUS_SERVER": self.urls,
            "VIRTBUS_CREDS": str(self._creds / f"{user}.creds"),
            # not the shared one: another version may bring another wrapper
            "VIRTBUS_WRAPPER_DIR": str(STATE / "wrapper"),
            "VIRTBUS_WRAPPER": str(STATE / "wrapper/vmwrapper"),
            "VIRTBUS_ACCELERATOR": _accelerator(),
            "VIRTBUS_LOG_FORMAT": "json",
            **self._more,
        }

    def stop_service(self, service: str) -> None:
        """Stop it as systemd would."""
        pid = self.host.pids()[service]
        self.host.box.unkeep(service)
        self.host.box.kill(pid, signal.SIGTERM)
        until(lambda: service not in self.host.pids(), f"{service} ended")

    def change(self, service: str, python: Path) -> None:
        """Replace the running service by another version."""
        self.stop_service(service)
        self.python[service] = python
        self.run_service(service)
        until(lambda: self.host.pids().get(service), f"{service} runs")
        self.wait_whole(within_s=READY_S)

    def service_log(self, service: str) -> str:
        """Return the output of a service."""
        return (self.host.box.base / f"{service}.log").read_text(errors="replace")


@contextmanager
def one_host(python: Path, settings: Mapping[str, str] | None = None) -> Iterator[OneHost]:
    """The host, ready, with all services of `python`'s version. `settings` are of all services."""
    machine.refuse_the_machines_own_network()
    prepare()
    with boxes(SEED) as held:
        made = OneHost(held, python, settings or {})
        try:
            made.start()
            yield made
        except BaseException:
            made.keep_logs()
            raise
        finally:
            made.host.off()
