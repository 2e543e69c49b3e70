"""Every architecture of the table, in every way, on both meshes, against plain torch."""

import pytest

from tests.models.architectures import ARCHITECTURES
from tests.models.model_check import check_architecture


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_trains_as_on_one_device(name: str) -> None:
    report = check_architecture(name)
    if report.skipped:
        pytest.skip(report.skipped)
    assert report.results
    assert report.failures == {}
