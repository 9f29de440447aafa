"""The front proxy's configuration is read again after a failure."""

from pathlib import Path
from typing import Any, cast

from tests.kubernetes.certificates import Authority

from virtbus.kubebridge.core.api.front_proxy import NAME, NAMESPACE
from virtbus.kubebridge.edge.cluster import KubernetesApi
from virtbus.kubebridge.edge.web.authorization import Authorization
from virtbus.kubebridge.edge.web.tls import TlsListener


class Saying:
    """A cluster with the ConfigMap of the front proxy."""

    def __init__(self, ca: str) -> None:
        self.ca = ca

    async def get(self, _: object, name: str, namespace: str) -> dict[str, Any]:
        assert (name, namespace) == (NAME, NAMESPACE)
        return {"data": {"requestheader-client-ca-file": self.ca}}


async def test_missing_certificate_files_do_not_stop_the_bridge(
    tmp_path: Path,
) -> None:
    """The tool that maintains the files replaces them just as the front proxy's CA changes."""
    authority = Authority(tmp_path, "front")
    own = authority.sign("own", "own", hosts=["localhost"])
    door = TlsListener()
    door.show(*own)
    asking = Authorization(cast("KubernetesApi", Saying(authority.certificate.read_text())), door)
    kept = own.key.rename(tmp_path / "kept")
    assert await asking.look() is False
    kept.rename(own.key)
    assert await asking.look() is True
