"""KubeVirt's fields, each with its verdict: mapped, ignored or refused.

One row a field, and what lies beneath an ignored or refused one has its row. Must not enter: how
objects are walked, or what follows from two fields together (`rules`).
"""
