"""Whom to believe is looked up anew, whatever is in the way at one time."""

from pathlib import Path
from typing import Any, cast

from tests.kubernetes.certificates import Authority

from virtbus.kubebridge.core.front_proxy import NAME, NAMESPACE
from virtbus.kubebridge.edge.cluster import Cluster
from virtbus.kubebridge.edge.web.asking import Asking
from virtbus.kubebridge.edge.web.door import Door


class Saying:
    """The cluster's ConfigMap."""

    def __init__(self, ca: str) -> None:
        self.ca = ca

    async def get(self, _: object, name: str, namespace: str) -> dict[str, Any]:
        assert (name, namespace) == (NAME, NAMESPACE)
        return {"data": {"requestheader-client-ca-file": self.ca}}


async def test_files_of_a_certificate_that_are_away_for_a_moment_end_nothing(
    tmp_path: Path,
) -> None:
    """Whoever keeps them puts others in their place, just as the front proxy's CA changes."""
    authority = Authority(tmp_path, "front")
    own = authority.sign("own", "own", hosts=["localhost"])
    door = Door()
    door.show(*own)
    asking = Asking(cast("Cluster", Saying(authority.certificate.read_text())), door)
    kept = own.key.rename(tmp_path / "kept")
    assert await asking.look() is False
    kept.rename(own.key)
    assert await asking.look() is True
