"""Load: many VMs on many simulated nodes, measured; and a storm of real guests."""
