"""Times of single parts: decisions, plans, prefixes, the simulator, the path through Serve."""
