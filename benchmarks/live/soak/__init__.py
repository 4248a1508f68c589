"""A mixed load for any duration, with and without faults: ``sluice bench soak``."""
