"""The latency model of an engine, measured when it starts, and the warm-up of its features."""
