"""Real vLLM engines in one process, or in a child process of it."""
