"""From a validated request to its last byte: placement, attempts, stalled attempts, resumed
streams."""
