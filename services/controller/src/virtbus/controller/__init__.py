"""The controller: the public API, admission, placement, and the completion of deletes.

Any number of controllers run, and all are active: the create path has no leader. Must not enter:
anything that touches a host, or writes a VM's status.
"""
