"""Limits on the cost of structured output: grammars are checked in a separate process, and their
time in the engine is bounded."""
