"""The deciding actor's state: replicas, breakers, drains, rate limits, guarantees in progress."""
