"""Tests on several hosts are skipped where hosts cannot be made."""

import pytest

from tests.hosts.network_hosts import why_not


@pytest.fixture(autouse=True)
def hosts_can_be_made() -> None:
    if reason := why_not():
        pytest.skip(reason)
