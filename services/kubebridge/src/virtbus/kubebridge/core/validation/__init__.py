"""Checks manifests as KubeVirt and virtbus do, and answers admission reviews."""
