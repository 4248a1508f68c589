"""Figures of the default scheduler that the fleet's predictions of its work must share."""

UNKNOWN_OUTPUT_TOKENS = 256.0
"""Taken for the length of an output of which nothing is known."""

GROWTH_TOKENS = 4
"""KV room per running sequence that admission leaves free. Without any, running sequences outgrow
the pool and preempt each other; more only leaves KV unused."""

TTFT_SHARE = 0.25
"""Longest batch, as a share of the least recent TTFT: a request that comes waits for its end."""

PREFILL_SHARE = 0.25
"""Least share of a batch's time for prefill beyond its first token, where prefill waits behind
decodes: about that share of its best throughput is left to it."""

MIN_STEPS = 8
"""But a batch may take as long as this many empty steps: shorter ones would mostly be overhead."""
