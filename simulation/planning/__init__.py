"""How many replicas a recorded or described load needs: ``sluice simulate``.

It reads configurations as the deployment does, so unlike the rest of :mod:`simulation` it imports
:mod:`deploy`.
"""
