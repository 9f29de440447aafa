"""KubeVirt's fields, each with its verdict: mapped, ignored or refused.

Each field has one row. The row of an ignored or refused field covers all fields below it. The walk
through objects and the rules between two fields (`rules`) do not belong here.
"""
