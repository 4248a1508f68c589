"""How the KV of a prompt gets from the engine that computed it to the one that goes on with it."""
