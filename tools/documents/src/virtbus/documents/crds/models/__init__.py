"""Models of KubeVirt's objects: fields with KubeVirt's names and descriptions, without rules.

The CRDs are generated from them (`crd.py`). The models have no defaults and no behaviour: the
API server must return each object as it was written. Names are those of KubeVirt 1.10
(kubevirt.io/v1).
"""
