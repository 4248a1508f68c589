"""How long a batch takes: models, what they are fitted to, and how they are corrected."""
