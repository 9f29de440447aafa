"""Defines the names of the labels and annotations that say which pod of Kubernetes a VM is."""

POD_NAME, POD_NAMESPACE = "io.kubernetes.pod.name", "io.kubernetes.pod.namespace"
POD_UID = "io.kubernetes.pod.uid"
