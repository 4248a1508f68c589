"""Sluice beside what is used in its place, on real engines: ``sluice bench peers``."""
