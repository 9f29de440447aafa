"""The Kubernetes bridge: a client of the bus that offers KubeVirt's API to a cluster.

It reads Kubernetes objects, sends requests to virtbus, and writes virtbus' answers as status. Must
not enter: writes of desired records, or anything that touches a host.
"""
