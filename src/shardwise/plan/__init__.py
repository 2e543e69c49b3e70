"""Decisions: the steps of a redistribution, and the layouts in which an operator runs."""
