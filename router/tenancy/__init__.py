"""API keys, and the limits and rate limits of each tenant."""
