"""The local page in a real browser: dragged, typed at, reloaded, and its numbers held to the library's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import torch

import khot
from tests.browser.driver import DESKTOP, PHONE, browser, complaints, overflow, set_screen, shoot

pytest.importorskip("selenium", reason="`make test-browser` installs it")
pytest.importorskip("starlette", reason="the page needs khot[explore]")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from khot.explore import server


@pytest.fixture(scope="module")
def address() -> str:
    listener = server.bind(0)
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    return server.address(listener)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(chromium: Any, address: str) -> Any:
    set_screen(chromium, DESKTOP)
    chromium.get(address)
    chromium.execute_script("localStorage.clear()")
    chromium.get_log("browser")
    opened(chromium, address)
    return chromium


def opened(driver: Any, address: str) -> None:
    driver.get(address)
    wait(driver, lambda: settled(driver))


def wait(driver: Any, done: Callable[[], bool], seconds: float = 30) -> None:
    WebDriverWait(driver, seconds, poll_frequency=0.05).until(lambda _: done())


def settled(driver: Any) -> bool:
    """Whether every card shows the state of the address."""
    return driver.execute_script(
        "const cards = [...document.querySelectorAll('.card')];"
        "return cards.length > 0 && cards.every((card) => card.dataset.settled === card.dataset.asked)"
    )


def state(driver: Any) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(driver.current_url).query).items()}


def numbers(driver: Any, name: str, column: int) -> list[float]:
    rows = "document.querySelectorAll(`.card[data-name='${arguments[0]}'] .numbers tbody tr`)"
    script = f"return [...{rows}].map((row) => row.cells[arguments[1]].textContent)"
    return [float(word) for word in driver.execute_script(script, name, column)]


def expected(asked: dict[str, str], method: str) -> torch.Tensor:
    scores = torch.tensor([float(word) for word in asked["x"].split(",")], dtype=torch.float64)
    k = float(asked["k"])
    return khot.soft_topk(scores, int(k) if k.is_integer() else k, float(asked["tau"]), method=method)


def agrees(driver: Any, *methods: str) -> None:
    asked = state(driver)
    for method in methods:
        shown = torch.tensor(numbers(driver, method, 2), dtype=torch.float64)
        torch.testing.assert_close(shown, expected(asked, method), rtol=0, atol=5.1e-5)


def test_first_sight_shows_the_numbers_of_the_library(page: Any) -> None:
    assert state(page)["methods"] == "sigmoid,euclidean,softrank"
    agrees(page, "sigmoid", "euclidean", "softrank")
    assert "sum 3.0000" in page.find_element(By.CSS_SELECTOR, "[data-name=sigmoid] .figures").text
    assert complaints(page) == []


def test_a_knob_is_dragged(page: Any) -> None:
    before = state(page)["x"].split(",")
    knob = page.find_elements(By.CSS_SELECTOR, ".knob")[1]
    ActionChains(page).click_and_hold(knob.find_element(By.CSS_SELECTOR, ".hit")).move_by_offset(0, -40).move_by_offset(
        0, -20
    ).release().perform()
    wait(page, lambda: state(page)["x"].split(",") != before and settled(page))
    after = state(page)["x"].split(",")
    assert float(after[1]) > float(before[1]) + 0.5
    assert [a for i, a in enumerate(after) if i != 1] == [b for i, b in enumerate(before) if i != 1]
    agrees(page, "sigmoid", "euclidean", "softrank")


def test_a_finger_drags_too(page: Any, address: str) -> None:
    set_screen(page, PHONE)
    opened(page, address)
    before = float(state(page)["x"].split(",")[2])
    knob = page.find_elements(By.CSS_SELECTOR, ".knob .hit")[2]
    finger = ActionBuilder(page, mouse=PointerInput("touch", "finger"))
    finger.pointer_action.move_to(knob).pointer_down().move_by(0, 30).move_by(0, 30).pointer_up()
    finger.perform()
    wait(page, lambda: settled(page) and float(state(page)["x"].split(",")[2]) < before - 0.5)
    agrees(page, "sigmoid")


def test_the_keyboard_moves_scores_k_and_tau(page: Any) -> None:
    knob = page.find_elements(By.CSS_SELECTOR, ".knob")[0]
    knob.send_keys(Keys.ARROW_UP, Keys.ARROW_UP, Keys.PAGE_UP)
    page.find_element(By.ID, "k").send_keys(Keys.ARROW_RIGHT)
    page.find_element(By.ID, "tau").send_keys(Keys.ARROW_LEFT)
    wait(page, lambda: settled(page))
    asked = state(page)
    assert float(asked["x"].split(",")[0]) == pytest.approx(2.4)
    assert asked["k"] == "4" and float(asked["tau"]) < 0.5
    assert knob.get_attribute("aria-valuenow") == "2.4"
    agrees(page, "sigmoid", "softrank")
    page.find_element(By.CSS_SELECTOR, "[data-name=sigmoid] canvas").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert "∂mask[1] / ∂score[1]" in page.find_element(By.CSS_SELECTOR, "[data-name=sigmoid] .probe").text


def test_methods_and_designs_stand_side_by_side_and_come_back_after_a_reload(page: Any) -> None:
    for value in ("halving", "gumbel"):
        page.find_element(By.CSS_SELECTOR, f".chips input[value={value}]").send_keys(Keys.SPACE)
    page.find_element(By.CSS_SELECTOR, ".chips input[value=euclidean]").send_keys(Keys.SPACE)
    wait(page, lambda: settled(page))
    names = [card.get_attribute("data-name") for card in page.find_elements(By.CSS_SELECTOR, ".card")]
    assert names == ["sigmoid", "softrank", "halving", "systematic", "gumbel"]
    agrees(page, "halving")
    kept = page.current_url, numbers(page, "halving", 2), numbers(page, "gumbel", 3)
    page.refresh()
    wait(page, lambda: settled(page))
    assert (page.current_url, numbers(page, "halving", 2), numbers(page, "gumbel", 3)) == kept


def test_frequencies_stand_beside_the_probabilities(page: Any) -> None:
    asked = state(page)
    probs, shares = (torch.tensor(numbers(page, "systematic", column), dtype=torch.float64) for column in (2, 3))
    torch.testing.assert_close(probs, expected(asked, "sigmoid"), rtol=0, atol=5.1e-5)
    draws = int(asked["draws"])
    assert float(((shares - probs).abs() / (probs * (1 - probs) / draws).sqrt()).max()) < 5
    assert f"{draws} draws of size 3" in page.find_element(By.CSS_SELECTOR, "[data-name=systematic] .figures").text


def test_what_a_method_refuses_is_told_on_its_card(page: Any, address: str) -> None:
    opened(page, f"{address}?k=2.5&methods=sigmoid,softrank&designs=")
    agrees(page, "sigmoid")
    assert "whole number" in page.find_element(By.CSS_SELECTOR, "[data-name=softrank] .error").text
    assert not page.find_element(By.CSS_SELECTOR, "[data-name=sigmoid] .error").is_displayed()


def test_an_address_with_nonsense_still_opens(page: Any, address: str) -> None:
    opened(page, f"{address}?x=nan,1,<b>,1e99&k=99&tau=-3&methods=sigmoid,../x&designs=dice&pi=threshold&draws=1e9")
    asked = state(page)
    assert (asked["x"], asked["k"], asked["tau"], asked["methods"]) == ("1,1000", "2", "0.001", "sigmoid")
    agrees(page, "sigmoid")


def test_the_code_to_copy_makes_the_mask(page: Any) -> None:
    page.execute_script("document.querySelectorAll('details').forEach((box) => (box.open = true))")
    names: dict[str, Any] = {}
    exec(page.find_element(By.CSS_SELECTOR, "[data-name=softrank] pre code").text, names)
    torch.testing.assert_close(names["mask"], expected(state(page), "softrank"))
    page.find_element(By.CSS_SELECTOR, "[data-name=softrank] .copy").click()
    wait(page, lambda: page.find_element(By.CSS_SELECTOR, "[data-name=softrank] .copy").text == "copied")


def test_64_items_fit(page: Any, address: str) -> None:
    scores = torch.randn(64, generator=torch.Generator().manual_seed(0))
    opened(page, f"{address}?x={','.join(f'{score:.2f}' for score in scores.tolist())}&k=8&methods=sigmoid,softrank&designs=pivotal")
    agrees(page, "sigmoid", "softrank")
    shoot(page, "explore-64")
    set_screen(page, PHONE)
    assert overflow(page) <= 0


def test_nothing_is_asked_of_other_hosts(page: Any, address: str) -> None:
    asked = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked and all(url.startswith((address, "data:")) for url in asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_it_fits_every_screen(page: Any, address: str, size: tuple[int, int], scheme: str) -> None:
    set_screen(page, size, scheme)
    opened(page, f"{address}?methods=sigmoid,euclidean,softrank,halving&designs=systematic,gumbel")
    name = f"explore-{'phone' if size == PHONE else 'desktop'}-{scheme}"
    assert shoot(page, name).stat().st_size > 10_000
    if size == PHONE:
        page.execute_script("document.querySelector('.card').scrollIntoView()")
        shoot(page, f"{name}-cards")
    assert overflow(page) <= 0
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(18, 20, 28)") == (scheme == "dark")
    page.find_element(By.ID, "theme").click()
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != background
    assert complaints(page) == []
