"""How many replicas a recorded or described load needs: ``sluice simulate``."""
