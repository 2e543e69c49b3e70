"""Looking at what happens: which collectives were issued, from which lines, and why."""

from __future__ import annotations

from shardwise.debug.comm import CommDebugMode
from shardwise.debug.explain import explain
from shardwise.debug.guards import Budget, check_lock, comm_budget
from shardwise.debug.report import Report
from shardwise.debug.summary import Total

__all__ = ["Budget", "CommDebugMode", "Report", "Total", "check_lock", "comm_budget", "explain"]
