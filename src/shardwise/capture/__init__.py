"""Captured functions: recorded once as programs of local operators, and executed without dispatch."""

from shardwise.capture.captured_function import Captured, captured

__all__ = ["Captured", "captured"]
