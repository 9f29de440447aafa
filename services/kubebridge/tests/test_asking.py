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


async def test_an_invalid_front_proxy_is_read_again(tmp_path: Path) -> None:
    """Certificate files that are being replaced at the same moment are not needed for it."""
    authority = Authority(tmp_path, "front")
    own = authority.sign("own", "own", hosts=["localhost"])
    door, cluster = TlsListener(), Saying("no certificate")
    door.show(*own)
    own.key.unlink()
    asking = Authorization(cast("KubernetesApi", cluster), door)
    assert await asking.look() is False
    cluster.ca = authority.certificate.read_text()
    assert await asking.look() is True
