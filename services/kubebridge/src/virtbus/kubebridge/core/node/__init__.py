"""Labels the Kubernetes Nodes of virtbus nodes."""
