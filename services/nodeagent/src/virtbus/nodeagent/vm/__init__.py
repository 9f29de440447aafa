"""One VM on its node: its state machine, desired and observed state, and its actor."""
