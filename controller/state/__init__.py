"""The deciding actor's state: replicas, breakers, drains, rate limits, promises in progress."""
