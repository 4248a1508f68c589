"""The cost of a gateway in front of engines: ``sluice bench gateway``."""
