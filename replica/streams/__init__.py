"""Responses on their way to routers over plain TCP connections."""
