"""The local scheduler that every engine shares, and the state table that it writes."""
