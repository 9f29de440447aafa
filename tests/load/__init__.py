"""Load: many VMs on many simulated nodes, measured."""
