"""OpenAI's files and batches: requests that can wait, run on what the others leave."""
