"""vLLM as the engine of a replica: configuration, client, scheduler and KV connector."""
