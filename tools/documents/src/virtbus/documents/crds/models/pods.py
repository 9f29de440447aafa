"""Defines models of fields that pods and VMs share, such as affinity, DNS, probes and limits."""

from typing import Any

from virtbus.documents.crds.models.part import (
    Int32,
    Int64,
    IntOrString,
    Part,
    Quantity,
    must,
    said,
)

ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
WHOLE: dict[str, Any] = {"x-kubernetes-map-type": "atomic"}


class Requirement(Part):
    """A requirement on a label or field: a key, an operator, and values."""

    key: str = must("Key of the label or field.")
    operator: str = must(
        "Operator: In, NotIn, Exists or DoesNotExist. Node selectors also have Gt and Lt."
    )
    values: list[str] | None = said("Values that the operator compares with.", **ATOMIC)


class LabelSelector(Part):
    """Selects objects by labels. All requirements must be met."""

    matchExpressions: list[Requirement] | None = said("Requirements on labels.", **ATOMIC)
    matchLabels: dict[str, str] | None = said("Labels with the values that they must have.")


class NodeSelectorTerm(Part):
    """Selects nodes by labels and fields. All requirements must be met."""

    matchExpressions: list[Requirement] | None = said(
        "Requirements on labels of the node.", **ATOMIC
    )
    matchFields: list[Requirement] | None = said(
        "Requirements on fields of the node. The only field is metadata.name.", **ATOMIC
    )


class PreferredNodes(Part):
    """Nodes that the scheduler prefers."""

    preference: NodeSelectorTerm = must("Selects the preferred nodes.", **WHOLE)
    weight: Int32 = must("Weight of the preference: 1 to 100.")


class NodeSelector(Part):
    """Selects nodes that match at least one term."""

    nodeSelectorTerms: list[NodeSelectorTerm] = must(
        "Terms of the selector. A node must match one of them.", **ATOMIC
    )


class NodeAffinity(Part):
    """Rules for the nodes on which the VM may run."""

    preferredDuringSchedulingIgnoredDuringExecution: list[PreferredNodes] | None = said(
        "Nodes that the scheduler prefers.", **ATOMIC
    )
    requiredDuringSchedulingIgnoredDuringExecution: NodeSelector | None = said(
        "Nodes that are allowed. All others are excluded.", **WHOLE
    )


class PodAffinityTerm(Part):
    """Selects other pods or VMs, and the topology in which they count."""

    labelSelector: LabelSelector | None = said("Selects the others by labels.", **WHOLE)
    matchLabelKeys: list[str] | None = said(
        "Label keys that must have the same value on the others as on this object.", **ATOMIC
    )
    mismatchLabelKeys: list[str] | None = said(
        "Label keys that must have another value on the others than on this object.", **ATOMIC
    )
    namespaceSelector: LabelSelector | None = said(
        "Selects the namespaces of the others by labels.", **WHOLE
    )
    namespaces: list[str] | None = said(
        "Namespaces of the others. The default is the namespace of this object.", **ATOMIC
    )
    topologyKey: str = must(
        "Node label that defines the topology. Nodes with the same value form one domain."
    )


class WeightedPodAffinityTerm(Part):
    """A preferred term with its weight."""

    podAffinityTerm: PodAffinityTerm = must("Selects the others.")
    weight: Int32 = must("Weight of the preference: 1 to 100.")


class PodAffinity(Part):
    """Rules for running near to, or away from, other pods or VMs."""

    preferredDuringSchedulingIgnoredDuringExecution: list[WeightedPodAffinityTerm] | None = said(
        "Terms that the scheduler prefers to meet.", **ATOMIC
    )
    requiredDuringSchedulingIgnoredDuringExecution: list[PodAffinityTerm] | None = said(
        "Terms that must be met.", **ATOMIC
    )


class Affinity(Part):
    """Rules for the placement of a VM."""

    nodeAffinity: NodeAffinity | None = said("Rules for nodes.")
    podAffinity: PodAffinity | None = said("Run in the same topology domain as these others.")
    podAntiAffinity: PodAffinity | None = said("Run in another topology domain than these others.")


class Toleration(Part):
    """A node taint that this VM tolerates."""

    effect: str | None = said(
        "Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. The default is all."
    )
    key: str | None = said(
        "Key of the taint. An empty key with the operator Exists tolerates all taints."
    )
    operator: str | None = said("Operator: Exists, or Equal (the default).")
    tolerationSeconds: Int64 | None = said("Seconds for which a NoExecute taint is tolerated.")
    value: str | None = said("Value of the taint, for the operator Equal.")


class TopologySpreadConstraint(Part):
    """A rule for an even spread of VMs over topology domains."""

    labelSelector: LabelSelector | None = said("Selects the objects that are counted.", **WHOLE)
    matchLabelKeys: list[str] | None = said(
        "Label keys that must have the same value on counted objects as on this object.", **ATOMIC
    )
    maxSkew: Int32 = must("Largest difference in count between two topology domains.")
    minDomains: Int32 | None = said("Smallest number of topology domains.")
    nodeAffinityPolicy: str | None = said(
        "Treatment of nodeSelector and node affinity: Honor (the default) or Ignore."
    )
    nodeTaintsPolicy: str | None = said("Treatment of taints: Honor or Ignore (the default).")
    topologyKey: str = must(
        "Node label that defines the topology. Nodes with the same value form one domain."
    )
    whenUnsatisfiable: str = must(
        "Action if the rule cannot be met: DoNotSchedule or ScheduleAnyway."
    )


class DnsOption(Part):
    """An option of resolv.conf."""

    name: str | None = said("Name of the option.")
    value: str | None = said("Value of the option.")


class DnsConfig(Part):
    """DNS settings in addition to those of dnsPolicy."""

    nameservers: list[str] | None = said("IP addresses of DNS servers.", **ATOMIC)
    options: list[DnsOption] | None = said("Options of resolv.conf.", **ATOMIC)
    searches: list[str] | None = said("DNS search domains.", **ATOMIC)


class ResourceClaim(Part):
    """A claim on devices (dynamic resource allocation)."""

    name: str = must("Name of the claim in this VM.")
    resourceClaimName: str | None = said("Name of a ResourceClaim in the same namespace.")
    resourceClaimTemplateName: str | None = said(
        "Name of a ResourceClaimTemplate from which a claim is created."
    )


class ExecAction(Part):
    """A command that the guest agent runs in the guest."""

    command: list[str] | None = said(
        "Program and arguments, without a shell. Exit code 0 means success.", **ATOMIC
    )


class HttpHeader(Part):
    """A header of an HTTP request."""

    name: str = must("Name of the header.")
    value: str = must("Value of the header.")


class HttpGetAction(Part):
    """An HTTP GET request."""

    host: str | None = said("Host to connect to. The default is the guest's address.")
    httpHeaders: list[HttpHeader] | None = said("Headers of the request.", **ATOMIC)
    path: str | None = said("Path of the request.")
    port: IntOrString = must("Port to connect to.")
    scheme: str | None = said("Scheme of the request: HTTP (the default) or HTTPS.")


class TcpSocketAction(Part):
    """A TCP connection."""

    host: str | None = said("Host to connect to. The default is the guest's address.")
    port: IntOrString = must("Port to connect to.")


class GuestAgentPing(Part):
    """A ping of the guest agent."""


class Probe(Part):
    """A periodic check of the guest by one action."""

    exec: ExecAction | None = said("Run a command in the guest.")
    failureThreshold: Int32 | None = said(
        "Failures in a row before the probe fails. The default is 3."
    )
    guestAgentPing: GuestAgentPing | None = said("Ping the guest agent.")
    httpGet: HttpGetAction | None = said("Send an HTTP GET request.")
    initialDelaySeconds: Int32 | None = said(
        "Seconds between the start of the guest and the first check."
    )
    periodSeconds: Int32 | None = said("Seconds between two checks. The default is 10.")
    successThreshold: Int32 | None = said(
        "Successes in a row before a failed probe succeeds again. The default is 1."
    )
    tcpSocket: TcpSocketAction | None = said("Open a TCP connection.")
    timeoutSeconds: Int32 | None = said("Seconds before a check times out. The default is 1.")


class LocalReference(Part):
    """A reference to an object in the same namespace."""

    name: str | None = said("Name of the object.")


class ResourceList(Part):
    """Requests and limits of CPU and memory."""

    limits: dict[str, Quantity] | None = said("Upper limits of cpu and memory.")
    overcommitGuestOverhead: bool | None = said(
        "Do not request memory for the emulator's overhead."
    )
    requests: dict[str, Quantity] | None = said("Amounts of cpu and memory that are reserved.")
