"""Makes security groups of virtbus of NetworkPolicies."""
