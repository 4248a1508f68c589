"""What one GPU shows of Sluice and of stock vLLM: ``sluice bench gpu``."""
