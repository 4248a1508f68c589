"""The latency model of an engine, measured when it starts, and what is warmed up before it is
ready."""
