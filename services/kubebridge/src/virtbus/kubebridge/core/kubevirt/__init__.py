"""KubeVirt's objects as models: every field by KubeVirt's own name, what it means, and no rule.

The CRDs are generated from them (`core/crd.py`), so no defaults and no behaviour enter here: what
the API server takes must come back unchanged. Names are those of KubeVirt 1.10 (kubevirt.io/v1).
"""
