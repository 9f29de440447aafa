"""Rounds of plug, traffic and unplug of an interface of a running guest."""

from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until

GATEWAY = "10.127.0.1"


class Web:
    """A running guest, and a login in it by its first interface."""

    gateway = GATEWAY
    """The address that the plugged interface sends packets to."""

    def __init__(self, platform: Platform, login: Login, view: Json) -> None:
        self.platform = platform
        self.login = login
        self.view = view

    def __call__(self, command: str) -> str:
        return self.login(self.view, command).strip()

    def now(self) -> Json:
        """Return the VM as the bus shows it."""
        return self.platform.get("web")

    def nics(self) -> dict[str, Json]:
        return {one["name"]: one for one in self.now().get("interfaces") or ()}

    def conditions(self) -> dict[str, str]:
        found = self.now()["conditions"]
        return {one["type"]: one["reason"] for one in found if one["status"]}

    def add(self) -> None:
        """Ask for a further interface, `more`."""
        self.platform.cli("vm", "nic", "add", "web", "--name", "more")

    def remove(self, name: str) -> None:
        """Ask for the end of an interface."""
        self.platform.cli("vm", "nic", "remove", "web", name)

    def plug(self) -> Json:
        """Plug an interface; return it once the guest has it."""
        self.add()
        seen = lambda: f"plugged: {self.now()}"  # noqa: E731
        nic: Json = until(lambda: self._plugged("more"), seen)
        return nic

    def _plugged(self, name: str) -> Json | None:
        nic = self.nics().get(name)
        return nic if nic is not None and nic.get("plug", "plugged") == "plugged" else None

    def unplug(self, name: str = "more") -> None:
        """Unplug an interface; return once the guest has released it."""
        self.remove(name)
        until(lambda: name not in self.nics(), lambda: f"unplugged: {self.now()}")

    def device(self, nic: Json) -> str:
        """The guest's name of an interface, once its driver has it."""
        look = f"grep -l {nic['mac']} /sys/class/net/*/address"
        path = until(lambda: self(f"{look} || true"), f"{nic['mac']} in the guest")
        return str(path).split("/")[4]

    def use(self, nic: Json) -> None:
        """Wait for the address that the guest gets by DHCP, and send packets from it."""
        name, address = self.device(nic), nic["addresses"][0]
        until(lambda: f" {address} " in self(f"ip addr show dev {name}"), f"{address} by DHCP")
        assert " 0% packet loss" in self(f"ping -c 2 -W 5 -I {name} {self.gateway}")

    def rounds(self, count: int) -> None:
        """Plug an interface, use it and unplug it, `count` times."""
        before = self("ls /sys/class/net | sort")
        for _round in range(count):
            nic = self.plug()
            self.use(nic)
            self.unplug()
            until(lambda: self("ls /sys/class/net | sort") == before, "the device is gone")
        assert "RestartRequired" not in self.conditions()
        assert "NicChangePending" not in self.conditions()
