"""Limits on communication: budgets and lock files."""
