"""Which processes run here, with what environment, and how long a dead one rests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from virtbus.cli.failures import usage

CONTROLLER = "controller"
REAL_SERVICES = ("imaged", "netd", "nodeagent")
SIMULATED_SERVICES = ("nodeagent",)
ALL, BUS_ONLY, NODE_ONLY = "all", "bus", "node"
"""What runs here: everything; a bus server and a controller; the node's services alone."""
DEFAULT_STATE_DIR, DEFAULT_RUN_DIR = Path("/var/lib/virtbus"), Path("/run/virtbus")
STEADY_S = 60.0
"""A service that lived this long starts again at the shortest rest."""
_REST_FIRST_S, _REST_MOST_S = 1.0, 30.0
# These point a person's own commands somewhere else; a service has its own file for that.
OURS_ALONE = ("VIRTBUS_SERVER", "VIRTBUS_CREDS", "VIRTBUS_NAMESPACE", "NOTIFY_SOCKET")


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything of this `up` is."""

    state_dir: Path
    run_dir: Path
    node: str
    simulate: bool
    log_level: str = "INFO"
    runs: str = ALL
    server: str = ""
    """NATS URLs of a bus elsewhere; empty: the bus is here, and the credentials know where."""
    node_creds: Path | None = None
    """The node's credentials on a bus elsewhere."""

    @property
    def services(self) -> tuple[str, ...]:
        """In the order of their start; they stop in the opposite one."""
        node = SIMULATED_SERVICES if self.simulate else REAL_SERVICES
        return {ALL: (CONTROLLER, *node), BUS_ONLY: (CONTROLLER,), NODE_ONLY: node}[self.runs]

    def creds(self, service: str) -> Path:
        """The bus credentials of a service."""
        if self.node_creds is not None:
            return self.node_creds
        users = {CONTROLLER: CONTROLLER, "nodeagent": f"node-{self.node}"}
        return self.run_dir / f"{users.get(service, f'{service}-{self.node}')}.creds"

    @property
    def client_creds(self) -> Path:
        return self.run_dir / "bus.creds"

    @property
    def wrapper_dir(self) -> Path | None:
        """Where this place's own vmwrapper is; None: where everybody looks.

        A wrapper has its netd's socket baked in, so that two places on one host need two.
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
    """State and run directory: flags, then `--data`, then environment, then the FHS.

    A simulation that nobody named a place for is apart from a real node's files.
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
    """The environment of a service's process."""
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
    if place.simulate and service == "nodeagent":
        env["VIRTBUS_SIMULATE"] = "1"
    if place.wrapper_dir is not None and service == "netd":
        env.setdefault("VIRTBUS_WRAPPER_DIR", str(place.wrapper_dir))
    if place.wrapper_dir is not None and service == "nodeagent":
        env.setdefault("VIRTBUS_WRAPPER", str(place.wrapper_dir / "vmwrapper"))
    return env


def rest_s(deaths: int) -> float:
    """How long to wait before the start after `deaths` ends in a row: 1, 2, 4 … 30 s."""
    return float(min(_REST_MOST_S, _REST_FIRST_S * 2 ** min(max(0, deaths - 1), 10)))
