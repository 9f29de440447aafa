"""Defines the names of the labels and annotations that name the Kubernetes pod of a VM."""

POD_NAME, POD_NAMESPACE = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
POD_UID = "io.kubernetes.pod.uid"
