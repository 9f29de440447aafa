"""The bridge's settings."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from virtbus.bus.settings import ServiceSettings


class Settings(ServiceSettings):
    """Settings of `virtbus-kubebridge`."""

    service: ClassVar[str] = "kubebridge"

    kubeconfig: Path | None = Field(
        None, description="kubeconfig of the cluster; empty: the service account of this pod"
    )
    kube_context: str = Field("", description="context of kubeconfig; empty: its current one")
    cluster: str = Field(
        "",
        max_length=63,
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$",
        description="what VMs of this cluster are labelled with on the bus; empty: the uid of "
        "the namespace kube-system",
    )
    listen: str = Field(
        "0.0.0.0:8443",
        description="address and port of the aggregated API and of the webhooks, by TLS",
    )
    namespace: str = Field(
        "kubevirt", description="where the bridge's own Lease and certificates are"
    )
    certificates: Path | None = Field(
        None,
        description="folder with tls.crt and tls.key, kept by cert-manager or another; empty: "
        "the bridge makes its own, in a Secret, and tells API servers",
    )
    webhook_certificate: bool = Field(
        False,
        description="answer admission reviews only to who shows the front proxy's certificate; "
        "API servers need a configuration for it (docs/howto/kubernetes.md)",
    )

    @property
    def bus_user(self) -> str:
        return "bridge"
