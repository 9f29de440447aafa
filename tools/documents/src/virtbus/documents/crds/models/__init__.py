"""Models of KubeVirt's objects: fields with KubeVirt's names and descriptions, without rules.

`crd.py` generates the CRDs from these models. The models have no defaults, because the API server
must return each object as it was written. Names are those of KubeVirt 1.10 (kubevirt.io/v1).
"""
