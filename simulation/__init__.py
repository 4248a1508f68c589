"""A virtual-time engine and cluster that run the same policies as production."""
