"""Limits on the cost of structured output: a check of each grammar, and a bound in the engine."""
