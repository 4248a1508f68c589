"""From a validated request to its last byte: placement, attempts, stalls, resumed streams."""
