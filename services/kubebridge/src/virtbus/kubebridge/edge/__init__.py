"""The bridge's access to Kubernetes: list and watch, the writer, the API, certificates.

It reads objects, asks `core` for actions, and executes them. Must not enter: a rule of KubeVirt's.
"""
