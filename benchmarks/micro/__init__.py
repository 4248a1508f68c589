"""Times of single parts: decisions, plans, the simulator, the path through Serve."""
