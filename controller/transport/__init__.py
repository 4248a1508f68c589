"""How decisions and reports travel: a plain connection, its message formats and their checks."""
