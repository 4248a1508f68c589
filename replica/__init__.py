"""One engine and its local scheduler."""
