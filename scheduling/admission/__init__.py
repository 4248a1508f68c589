"""What a replica may still promise."""
