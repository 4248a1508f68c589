"""The HTTP edge: the OpenAI API, the SLO on the wire, dispatch to replicas."""
