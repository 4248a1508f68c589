"""Preemption of a running prefill at the next operator or layer, inside stock vLLM.

A check before each operator of a prefill tests whether the prefill must stop. If so, the thread
that computes it serves other tasks from inside the check, and resumes the prefill later. So the
suspended state is a call stack, and nothing has to be saved or restored. In the order of a request:

- :mod:`sluice.replica.preemption.scheduler` builds the batch of a task with vLLM's own scheduler;
- :mod:`sluice.replica.preemption.engine_loop` decides on events, and sends tasks to the worker;
- :mod:`sluice.replica.preemption.executor` holds the worker's thread, or several workers;
- :mod:`sluice.replica.preemption.worker` runs tasks, nested where they preempt, with a model runner
  for every nesting depth;
- :mod:`sluice.replica.preemption.checks` puts the checks into the model."""
