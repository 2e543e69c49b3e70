"""Captured functions: recorded once as programs of local operators, and executed without dispatch."""

from shardwise.capture.captured_function import Captured, captured
from shardwise.capture.captured_report import CapturedReport

__all__ = ["Captured", "CapturedReport", "captured"]
