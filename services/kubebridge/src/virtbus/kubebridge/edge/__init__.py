"""The bridge's access to Kubernetes: list and watch, writes, the served API, certificates.

These modules read objects, ask `core` for actions, and execute the actions. KubeVirt's rules belong
into `core`.
"""
