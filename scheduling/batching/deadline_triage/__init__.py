"""Deadline triage: the policy, its rows, and which prefills it keeps."""
