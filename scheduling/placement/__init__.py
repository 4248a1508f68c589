"""Where a request goes and what is promised: the decision and what it learns from."""
