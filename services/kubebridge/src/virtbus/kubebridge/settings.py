"""Settings of the bridge."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from virtbus.bus.runtime.settings import ServiceSettings


class Settings(ServiceSettings):
    """Settings of `virtbus-kubebridge`."""

    service: ClassVar[str] = "kubebridge"

    kubeconfig: Path | None = Field(
        None,
        description="kubeconfig of the cluster, with its current context; empty: the service "
        "account of this pod",
    )
    cluster: str = Field(
        "",
        max_length=63,
        pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$",
        description="label of this cluster's VMs on the bus; empty: the uid of "
        "the namespace kube-system",
    )
    listen: str = Field(
        "0.0.0.0:8443",
        description="address and port of the aggregated API and the webhooks (TLS)",
    )
    namespace: str = Field(
        "kubevirt", description="namespace of the bridge's Lease and certificates"
    )
    certificates: Path | None = Field(
        None,
        description="folder with tls.crt and tls.key, for example from cert-manager; empty: "
        "the bridge makes its own in a Secret and gives their CA to the API server",
    )
    webhook_certificate: bool = Field(
        False,
        description="answer admission reviews only to clients with the front proxy's certificate; "
        "API servers must be configured for it (docs/howto/kubernetes.md)",
    )

    @property
    def bus_user(self) -> str:
        return "bridge"
