"""SLO-aware serving control plane for large language models on Ray.

The packages lie at the top of the repository. Here they are links, so that all of them install and
import under one name.
"""
