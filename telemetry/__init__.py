"""What a process tells of each request beside its metrics: log lines and trace spans."""
