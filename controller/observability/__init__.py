"""What people and Prometheus see: metrics, history, decision log, state of replicas."""
