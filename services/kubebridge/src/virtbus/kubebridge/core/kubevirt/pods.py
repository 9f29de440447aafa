"""What a VM shares with a pod: where it may run, names, probes. Kubernetes' types, by its names."""

from typing import Any

from virtbus.kubebridge.core.kubevirt.part import (
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
    """A key, an operator, and values."""

    key: str = must("The label's key.")
    operator: str = must("In, NotIn, Exists or DoesNotExist; for nodes also Gt and Lt.")
    values: list[str] | None = said("What the label's value is compared with.", **ATOMIC)


class LabelSelector(Part):
    """Objects by their labels; all that is given must hold."""

    matchExpressions: list[Requirement] | None = said("Requirements on labels.", **ATOMIC)
    matchLabels: dict[str, str] | None = said("Labels and the values they must have.")


class NodeSelectorTerm(Part):
    """Nodes by labels and fields; all that is given must hold."""

    matchExpressions: list[Requirement] | None = said("Requirements on labels.", **ATOMIC)
    matchFields: list[Requirement] | None = said("Requirements on fields: metadata.name.", **ATOMIC)


class PreferredNodes(Part):
    """Nodes that are liked better."""

    preference: NodeSelectorTerm = must("The nodes.", **WHOLE)
    weight: Int32 = must("How much better, 1 to 100.")


class NodeSelector(Part):
    """Nodes of which one term holds."""

    nodeSelectorTerms: list[NodeSelectorTerm] = must("Any of them is enough.", **ATOMIC)


class NodeAffinity(Part):
    """Which nodes."""

    preferredDuringSchedulingIgnoredDuringExecution: list[PreferredNodes] | None = said(
        "Nodes that are liked better.", **ATOMIC
    )
    requiredDuringSchedulingIgnoredDuringExecution: NodeSelector | None = said(
        "Nodes that alone are possible.", **WHOLE
    )


class PodAffinityTerm(Part):
    """Others that carry some labels, and how near is near."""

    labelSelector: LabelSelector | None = said("Which others.", **WHOLE)
    matchLabelKeys: list[str] | None = said(
        "Labels whose own values are asked of others.", **ATOMIC
    )
    mismatchLabelKeys: list[str] | None = said("Labels whose own values others lack.", **ATOMIC)
    namespaceSelector: LabelSelector | None = said("In namespaces with these labels.", **WHOLE)
    namespaces: list[str] | None = said("In these namespaces; by default the own one.", **ATOMIC)
    topologyKey: str = must("Nodes with the same value of this label are near.")


class WeightedPodAffinityTerm(Part):
    """Others, and how much they weigh."""

    podAffinityTerm: PodAffinityTerm = must("The others.")
    weight: Int32 = must("How much, 1 to 100.")


class PodAffinity(Part):
    """Near to, or far from, others."""

    preferredDuringSchedulingIgnoredDuringExecution: list[WeightedPodAffinityTerm] | None = said(
        "Where it is liked better.", **ATOMIC
    )
    requiredDuringSchedulingIgnoredDuringExecution: list[PodAffinityTerm] | None = said(
        "Where alone it is possible.", **ATOMIC
    )


class Affinity(Part):
    """Where a VM wants to run."""

    nodeAffinity: NodeAffinity | None = said("On which nodes.")
    podAffinity: PodAffinity | None = said("Near to others.")
    podAntiAffinity: PodAffinity | None = said("Far from others.")


class Toleration(Part):
    """A taint of nodes that does not matter."""

    effect: str | None = said("NoSchedule, PreferNoSchedule or NoExecute; none: all.")
    key: str | None = said("The taint's key; none with Exists: all.")
    operator: str | None = said("Exists, or Equal (the default).")
    tolerationSeconds: Int64 | None = said("How long NoExecute does not matter.")
    value: str | None = said("The taint's value, with Equal.")


class TopologySpreadConstraint(Part):
    """How evenly VMs are spread over nodes."""

    labelSelector: LabelSelector | None = said("Whose spread is counted.", **WHOLE)
    matchLabelKeys: list[str] | None = said(
        "Labels whose own values are asked of others.", **ATOMIC
    )
    maxSkew: Int32 = must("By how many two places may differ.")
    minDomains: Int32 | None = said("How many places there should be at least.")
    nodeAffinityPolicy: str | None = said(
        "Honor (the default) or Ignore nodeSelector and affinity."
    )
    nodeTaintsPolicy: str | None = said("Honor or Ignore (the default) taints.")
    topologyKey: str = must("Nodes with the same value of this label are one place.")
    whenUnsatisfiable: str = must("DoNotSchedule or ScheduleAnyway.")


class DnsOption(Part):
    """An option of resolv.conf."""

    name: str | None = said("Its name.")
    value: str | None = said("Its value.")


class DnsConfig(Part):
    """What is added to the DNS settings of dnsPolicy."""

    nameservers: list[str] | None = said("Addresses of servers.", **ATOMIC)
    options: list[DnsOption] | None = said("Options of resolv.conf.", **ATOMIC)
    searches: list[str] | None = said("Search domains.", **ATOMIC)


class ResourceClaim(Part):
    """A claim on devices (dynamic resource allocation)."""

    name: str = must("How devices of this VM name it.")
    resourceClaimName: str | None = said("A ResourceClaim of the namespace.")
    resourceClaimTemplateName: str | None = said("A ResourceClaimTemplate that one is made of.")


class ExecAction(Part):
    """A program in the guest, by its agent."""

    command: list[str] | None = said("Program and arguments, without a shell; 0 is well.", **ATOMIC)


class HttpHeader(Part):
    """A header of a request."""

    name: str = must("Its name.")
    value: str = must("Its value.")


class HttpGetAction(Part):
    """A request by HTTP."""

    host: str | None = said("Whom to ask; by default the guest's address.")
    httpHeaders: list[HttpHeader] | None = said("More headers.", **ATOMIC)
    path: str | None = said("The path.")
    port: IntOrString = must("The port.")
    scheme: str | None = said("HTTP (the default) or HTTPS.")


class TcpSocketAction(Part):
    """A TCP connection."""

    host: str | None = said("Whom to ask; by default the guest's address.")
    port: IntOrString = must("The port.")


class GuestAgentPing(Part):
    """A ping of the guest's agent."""


class Probe(Part):
    """How a guest is asked whether it is well: one action, and how often."""

    exec: ExecAction | None = said("Run a program in the guest.")
    failureThreshold: Int32 | None = said("Failures in a row until it is unwell (3).")
    guestAgentPing: GuestAgentPing | None = said("Ping the guest's agent.")
    httpGet: HttpGetAction | None = said("Ask by HTTP.")
    initialDelaySeconds: Int32 | None = said("Seconds from the start to the first time.")
    periodSeconds: Int32 | None = said("Seconds from one time to the next (10).")
    successThreshold: Int32 | None = said("Successes in a row until it is well again (1).")
    tcpSocket: TcpSocketAction | None = said("Connect by TCP.")
    timeoutSeconds: Int32 | None = said("Seconds to an answer (1).")


class LocalReference(Part):
    """An object of the same namespace."""

    name: str | None = said("Its name.")


class ResourceList(Part):
    """CPU and memory that are asked for, and that bound."""

    limits: dict[str, Quantity] | None = said("What it never gets more of: cpu, memory.")
    overcommitGuestOverhead: bool | None = said("Do not count what the emulator itself needs.")
    requests: dict[str, Quantity] | None = said("What it gets for certain: cpu, memory.")
