"""Defines the processes that `up` runs, their paths and environment, and restart delays."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from virtbus.cli.failures import usage

CONTROLLER = "controller"
REAL_SERVICES = ("imaged", "netd", "nodeagent")
SIMULATED_SERVICES = ("simulator",)
ALL, BUS_ONLY, NODE_ONLY = "all", "bus", "node"
"""Values of `Place.runs`: everything; a bus and a controller; only the node's services."""
DEFAULT_STATE_DIR, DEFAULT_RUN_DIR = Path("/var/lib/virtbus"), Path("/run/virtbus")
STEADY_S = 60.0
"""A service that ran for longer than this restarts with the shortest delay."""
_REST_FIRST_S, _REST_MOST_S = 1.0, 30.0
# Services must not inherit these variables. Users set the first three for CLI commands, and systemd
# sets NOTIFY_SOCKET for `up` itself.
OURS_ALONE = ("VIRTBUS_SERVER", "VIRTBUS_CREDS", "VIRTBUS_NAMESPACE", "NOTIFY_SOCKET")


@dataclass(frozen=True, slots=True)
class Place:
    """Paths and names of this `up`."""

    state_dir: Path
    run_dir: Path
    node: str
    simulate: bool
    log_level: str = "INFO"
    runs: str = ALL
    server: str = ""
    """NATS URLs of a remote bus. Empty for a local bus, whose URL is in the credentials files."""
    node_creds: Path | None = None
    """The node's credentials file for a remote bus."""

    @property
    def services(self) -> tuple[str, ...]:
        """Return the services in the order of their start; the stop is in reverse order."""
        node = SIMULATED_SERVICES if self.simulate else REAL_SERVICES
        return {ALL: (CONTROLLER, *node), BUS_ONLY: (CONTROLLER,), NODE_ONLY: node}[self.runs]

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that must exist before a service starts.

        virtbus-cri writes files for imaged into image-names. On hosts with systemd,
        deploy/systemd/tmpfiles.conf creates that folder.
        """
        names = (self.run_dir / "image-names",) if "imaged" in self.services else ()
        return (self.state_dir, self.run_dir, *names)

    def creds(self, service: str) -> Path:
        if self.node_creds is not None:
            return self.node_creds
        agent = f"node-{self.node}"
        users = {CONTROLLER: CONTROLLER, "nodeagent": agent, "simulator": agent}
        return self.run_dir / f"{users.get(service, f'{service}-{self.node}')}.creds"

    @property
    def client_creds(self) -> Path:
        return self.run_dir / "bus.creds"

    @property
    def wrapper_dir(self) -> Path | None:
        """Return the folder of this `up`'s own vmwrapper; None means the default folder.

        Each `up` on a host needs its own vmwrapper, because a vmwrapper contains the path of its
        netd's socket.
        """
        return None if self.state_dir == DEFAULT_STATE_DIR else self.state_dir / "libexec"


def choose(
    *,
    data: str | None,
    state_dir: str | None,
    run_dir: str | None,
    environ: Mapping[str, str],
    simulate: bool = False,
) -> tuple[Path, Path]:
    """Return state and run directory: from flags, --data, the environment, or the default.

    The default directories of a simulation differ from those of a real node.
    """
    if data and (state_dir or run_dir):
        raise usage("--data names both directories; give it, or --state-dir and --run-dir")
    base = Path(data).absolute() if data else None
    state = state_dir or (str(base / "state") if base else environ.get("VIRTBUS_STATE_DIR"))
    run = run_dir or (str(base / "run") if base else environ.get("VIRTBUS_RUN_DIR"))
    usual = (DEFAULT_STATE_DIR, DEFAULT_RUN_DIR)
    if simulate:
        home = environ.get("XDG_STATE_HOME")
        apart = (Path(home) if home else Path.home() / ".local/state") / "virtbus-simulate"
        usual = (apart / "state", apart / "run")
    return Path(state or usual[0]).absolute(), Path(run or usual[1]).absolute()


def environment(
    place: Place, service: str, *, parent_fd: int, notify: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables for a service's process."""
    env = {name: value for name, value in inherited.items() if name not in OURS_ALONE}
    env |= {
        "VIRTBUS_NODE": place.node,
        "VIRTBUS_CREDS": str(place.creds(service)),
        "VIRTBUS_STATE_DIR": str(place.state_dir),
        "VIRTBUS_RUN_DIR": str(place.run_dir),
        "VIRTBUS_LOG_FORMAT": "json",
        "VIRTBUS_LOG_LEVEL": place.log_level,
        "VIRTBUS_PARENT_FD": str(parent_fd),
        "NOTIFY_SOCKET": notify,
        "PYTHONUNBUFFERED": "1",
    }
    if place.server:
        env["VIRTBUS_SERVER"] = place.server
    if place.wrapper_dir is not None and service == "netd":
        env.setdefault("VIRTBUS_WRAPPER_DIR", str(place.wrapper_dir))
    if place.wrapper_dir is not None and service == "nodeagent":
        env.setdefault("VIRTBUS_WRAPPER", str(place.wrapper_dir / "vmwrapper"))
    return env


def rest_s(deaths: int) -> float:
    """Return the restart delay after `deaths` consecutive ends: 1, 2, 4 … 30 s."""
    return float(min(_REST_MOST_S, _REST_FIRST_S * 2 ** min(max(0, deaths - 1), 10)))
