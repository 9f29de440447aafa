"""The Kubernetes bridge: one client of the bus that makes a cluster believe it has KubeVirt.

Kubernetes objects come in, requests of virtbus go out, and what virtbus says becomes status. Must
not enter: a desired record written by itself, or anything that touches a host.
"""
