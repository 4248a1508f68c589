"""Preemption of a running prefill at its next operator, inside stock vLLM.

A check before each operator tests whether the prefill must stop. If so, the thread that computes it
serves other tasks from inside the check. The suspended state is a call stack, so nothing is saved
or restored. ``scheduler`` builds batches, ``engine_loop`` decides, ``executor`` holds the worker's
thread or several workers, ``worker`` runs nested tasks, and ``checks`` are in the model."""
