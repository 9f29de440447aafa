"""A conflist of the host, as a fixture of tests that boot guests."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.e2e import host

CONFLIST = f"""{{
  "cniVersion": "1.0.0",
  "name": "{host.CNI_NETWORK}",
  "plugins": [
    {{"type": "bridge", "bridge": "e2ebr0", "isGateway": true, "ipMasq": false,
     "ipam": {{"type": "host-local", "dataDir": "/var/lib/cni/networks",
              "ranges": [[{{"subnet": "10.199.0.0/24"}}], [{{"subnet": "fd00:199::/64"}}]],
              "routes": [{{"dst": "0.0.0.0/0"}}, {{"dst": "::/0"}}]}}}}
  ]
}}
"""


@pytest.fixture
def cni_network() -> Iterator[str]:
    """A conflist of the real plugins, in netd's search path."""
    path = Path(f"/etc/cni/net.d/{host.CNI_NETWORK}.conflist")
    made = [folder for folder in (path.parent, path.parent.parent) if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CONFLIST)
    forward = Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding")
    forwarded = [path.read_text() for path in forward]
    try:
        yield host.CNI_NETWORK
    finally:
        for key, value in zip(forward, forwarded, strict=True):
            key.write_text(value)  # the bridge plugin enables it permanently
        path.unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        # the bridge plugin never removes its bridge
        host.run("ip", "link", "delete", "e2ebr0", check=False)
        networks = Path("/var/lib/cni/networks", host.CNI_NETWORK)
        for lasting in networks.glob("*") if networks.exists() else ():
            lasting.unlink()
        with suppress(OSError):
            networks.rmdir()
