"""`virtbus node VERB`: the verbs that change a host's desired state.

This package has the requests, waits and output of these verbs. The server makes the checks.
"""
