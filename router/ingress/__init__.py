"""What a request meets before its body is read: keys, limits on concurrency, load shedding."""
