"""The router's metrics, log lines and spans."""
