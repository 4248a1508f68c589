"""From the bytes of a request to a validated call and its SLO."""
