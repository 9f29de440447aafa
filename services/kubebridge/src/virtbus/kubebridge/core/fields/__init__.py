"""KubeVirt's fields, each with its verdict: mapped, ignored or refused.

Each field has one row. The row of an ignored or refused field covers all fields below that field.
Must not enter: rules between two fields; those are in `core.validation.rules`.
"""
