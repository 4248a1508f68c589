"""Shares and limits of tenants."""
