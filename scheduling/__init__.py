"""Pure scheduling algorithms on plain data: no Ray, no vLLM, no I/O and no clock of their own.

The same code runs inside the engine, in the controller's estimates and in the simulated engine.
"""
