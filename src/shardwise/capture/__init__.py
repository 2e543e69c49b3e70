"""Captured functions: recorded once as programs of local operators, and executed without dispatch."""

from shardwise.capture.captured_function import Captured, captured
from shardwise.capture.captured_report import CapturedReport
from shardwise.capture.loaded_program import LoadedProgram, load_captured

__all__ = ["Captured", "CapturedReport", "LoadedProgram", "captured", "load_captured"]
