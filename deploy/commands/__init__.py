"""The commands of ``sluice``, a file each. None imports Ray before it runs: Ray reads its
environment on import, and ``--help`` is quick."""
