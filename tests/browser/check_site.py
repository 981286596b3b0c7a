"""The built site in a real browser, opened from the disk: it loads nothing from elsewhere, its search works, and it fits every screen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.driver import DESKTOP, PHONE, browser, complaints, overflow, set_screen, shoot
from tools.links import problems

pytest.importorskip("selenium", reason="`make test-browser` installs it")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SITE = Path(os.environ.get("KHOT_SITE", Path(__file__).parents[2] / "build/site"))
SHOWN = ("index", "quickstart", "concepts", "choosing", "recipes", "coming", "methods", "methods/sigmoid", "designs/pivotal", "explorer")

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="`make test-browser` builds the site first")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as driver:
        yield driver


def test_every_link_leads_somewhere() -> None:
    assert problems(SITE) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_pages_fit_and_load_nothing_from_elsewhere(chromium: Any, size: tuple[int, int], scheme: str) -> None:
    set_screen(chromium, size, scheme)
    chromium.get((SITE / "index.html").as_uri())
    chromium.execute_script("localStorage.clear()")  # the theme keeps the last choice
    for name in SHOWN:
        chromium.get((SITE / f"{name}.html").as_uri())
        loaded = chromium.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert [url for url in loaded if not url.startswith(("file:", "data:", "blob:"))] == []
        assert overflow(chromium) <= 0, name
        broken = chromium.execute_script(
            "return [...document.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src)"
        )
        assert broken == []
        assert (chromium.execute_script("return document.body.dataset.mdColorScheme") == "slate") == (scheme == "dark")
        shoot(chromium, f"site-{name.replace('/', '-')}-{'phone' if size == PHONE else 'desktop'}-{scheme}")
    assert complaints(chromium) == []


def test_search_works_from_the_disk(chromium: Any) -> None:
    set_screen(chromium, DESKTOP)
    chromium.get((SITE / "index.html").as_uri())
    box = chromium.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]")
    box.click()
    box.send_keys("straight-through")
    found = WebDriverWait(chromium, 30).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__item a"))
    assert any("concepts" in link.get_attribute("href") for link in found)
    shoot(chromium, "site-search")
