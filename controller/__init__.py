"""The central actor: mirror of every replica, ledger of its own decisions, placement."""
