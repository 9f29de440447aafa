"""What touches Kubernetes: list and watch, the writer, the aggregated API, certificates.

It reads objects, asks `core` what follows, and does that. Must not enter: a rule of KubeVirt's.
"""
