"""The page of a report in a real browser: no errors, tables sort, and its numbers are those of the JSON.

python -m tests.virtual.test_explain_page docs/images    takes the pictures of the documentation
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.virtual.browser import address, browser, why_no_browser
from tests.virtual.transformer import transformer

NO_BROWSER = why_no_browser()
pytestmark = pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)


@pytest.fixture(scope="module")
def report() -> sw.debug.Report:
    return transformer(layers=1)


@pytest.fixture(scope="module")
def page(report: sw.debug.Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.to_html(path)
    with browser() as driver:
        driver.get(address(path, theme="light"))
        yield driver
        assert driver.get_log("browser") == []  # also after all the clicks


def value(page: Any, selector: str) -> float:
    return float(page.find_element("css selector", selector).get_attribute("data-value"))


def column(page: Any, table: str, number: int) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(cell => cell.dataset.value)"
    return page.execute_script(script, f"#{table} tbody tr > td:nth-child({number + 1})")


def click(page: Any, selector: str) -> None:
    page.execute_script("arguments[0].click()", page.find_element("css selector", selector))


def test_no_console_errors_and_no_network(page: Any) -> None:
    assert page.get_log("browser") == []
    assert page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def test_totals_are_those_of_the_json(page: Any, report: sw.debug.Report) -> None:
    data = report.to_json()
    assert data["total"]["collectives"] > 4
    assert value(page, "#tile-collectives") == data["total"]["collectives"]
    assert value(page, "#tile-received") == data["total"]["received_bytes"]
    assert value(page, "#tile-seconds") == data["total"]["seconds"]
    assert value(page, "#tile-count") == data["operators"]
    for by, sums in data["totals"].items():
        click(page, f"#tabs button[data-by={by}]")
        shown = zip(*(column(page, "totals-table", number) for number in range(4)), strict=True)
        assert {name: (int(n), float(received), float(seconds)) for name, n, received, seconds in shown} == {
            name or f"(no {by})": (total["collectives"], total["received_bytes"], total["seconds"])
            for name, total in sums.items()
        }


def test_every_operator_is_there(page: Any, report: sw.debug.Report) -> None:
    records = report.to_json()["records"]
    assert [int(index) for index in column(page, "operators-table", 0)] == list(range(len(records)))
    assert [float(received) for received in column(page, "operators-table", 7)] == [
        r["received_bytes"] for r in records
    ]


def test_tables_sort_when_a_heading_is_clicked(page: Any, report: sw.debug.Report) -> None:
    received = sorted(record["received_bytes"] for record in report.to_json()["records"])
    heading = "#operators-table th:nth-child(8)"
    click(page, heading)  # numbers: the largest first
    assert [float(text) for text in column(page, "operators-table", 7)] == received[::-1]
    click(page, heading)
    assert [float(text) for text in column(page, "operators-table", 7)] == received
    click(page, "#operators-table th:nth-child(2)")  # words: from the beginning
    names = column(page, "operators-table", 1)
    assert sorted(names) == sorted(record.name for record in report.records)
    assert names == sorted(names, key=lambda name: name.replace("_", "\0"))
    click(page, "#operators-table th:nth-child(1)")
    click(page, "#operators-table th:nth-child(1)")


def test_filters_and_details(page: Any, report: sw.debug.Report) -> None:
    click(page, "#moving")
    moving = [record for record in report.records if record.moves]
    assert len(column(page, "operators-table", 0)) == len(moving)
    click(page, "#operators-table tbody tr.row")
    detail = page.find_element("css selector", "tr.detail").text
    assert moving[0].moves[0].words in detail
    assert str(moving[0].where) in detail
    click(page, "#operators-table tbody tr.row")
    assert not page.find_elements("css selector", "tr.detail")
    click(page, "#moving")


def test_the_timeline_shows_every_collective(page: Any, report: sw.debug.Report) -> None:
    pieces = page.find_elements("css selector", "#timeline rect.piece")
    assert len(pieces) == report.total.collectives
    click_piece = "arguments[0].dispatchEvent(new MouseEvent('click'))"
    page.execute_script(click_piece, pieces[0])
    assert len(page.find_elements("css selector", "tr.detail")) == 1


def test_both_themes(page: Any) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(ground)
    click(page, "#theme")
    assert page.execute_script(ground) != light
    click(page, "#theme")
    assert page.execute_script(ground) == light


def test_an_empty_report_is_a_page_too(page: Any, tmp_path: Path) -> None:
    before = page.current_url
    with sw.explain() as nothing:
        pass
    nothing.to_html(tmp_path / "empty.html")
    page.get(address(tmp_path / "empty.html"))
    assert page.get_log("browser") == []
    assert value(page, "#tile-collectives") == 0
    page.get(before)


def take_pictures(folder: Path) -> None:
    """The page in both themes."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    page = folder / "explain.html"
    os.chdir(Path(__file__).parent)  # paths on the page are those from here
    transformer(layers=2, width=256).to_html(page)
    for theme in ("light", "dark"):
        with browser(height=1080 if theme == "light" else 900) as driver:
            driver.get(address(page, theme=theme))
            if theme == "dark":
                click(driver, "#moving")
                click(driver, "#operators-table tbody tr.row:nth-of-type(2)")
                driver.execute_script("document.querySelector('#filter').closest('section').scrollIntoView()")
            driver.save_screenshot(str(folder / f"explain-{theme}.png"))
    page.unlink()


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]))
