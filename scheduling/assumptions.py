"""Figures that the default scheduler works with and that predictions of its work share.

The fleet predicts what ``deadline_triage`` will do at a replica: one of them with a figure of its
own would guarantee what the other does not hold.
"""

UNKNOWN_OUTPUT_TOKENS = 256.0
"""Taken for the length of an output of which nothing is known."""

GROWTH_TOKENS = 4
"""KV room per running sequence that admission leaves free. Without any, running sequences outgrow
the pool and preempt each other; more only leaves KV unused."""

TTFT_SHARE = 0.25
"""A batch takes no longer than this share of the least TTFT that was seen lately, as a request that
comes while it runs waits for its end."""

PREFILL_SHARE = 0.25
"""The least share of a batch's time for prefill beyond its first token, where prefill waits behind
decodes: at least about that share of its best throughput is left to it. A decode's objective can be
held as long as the step's fixed time and the decodes due with it take less than the rest."""

LEAST_STEPS = 8
"""But it may take as long as this many empty steps, as shorter ones would mostly be overhead, and
as the least pace of the decodes."""
