"""The replicas as the controller mirrors them: their rows, what is reserved on them, their
caches."""
