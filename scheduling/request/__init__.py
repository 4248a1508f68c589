"""A request as policies see it: its objective, its deadlines, and its row in a queue."""
