"""What becomes of requests when parts of a running system break: a system, a load and one fault."""
