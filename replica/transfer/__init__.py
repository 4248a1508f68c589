"""KV transfer of a prompt: from the engine that computed it to the one that decodes."""
