"""The commands of ``sluice``, a file each; :mod:`sluice.deploy.cli` puts them together.

None imports Ray before it runs: Ray reads its environment on import, and ``--help`` is quick.
"""
