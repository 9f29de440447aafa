"""`virtbus node VERB`: the verbs that change a host's desired state.

Belongs here: requests, waiting and output of these verbs. Must not enter: checks that the server
makes.
"""
