"""The playground in a real browser, on a real deployment: what people see is what the API said.

Set BATON_SCREENSHOTS to a folder to keep the pictures that docs/images holds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.e2e

WIDE, NARROW = (1240, 900), (390, 844)


class Page:
    """The playground as a person uses it."""

    def __init__(self, chrome: Any, url: str) -> None:
        self.chrome = chrome
        self.url = url

    def open(self, size: tuple[int, int] = WIDE, theme: str = "light") -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.chrome.get_log("browser")
        self.chrome.get(f"{self.url}/playground")
        self.wait(lambda: self.text("model") == "tiny-mtp")

    def find(self, selector: str) -> list[Any]:
        return list(self.chrome.find_elements(By.CSS_SELECTOR, selector))

    def one(self, name: str) -> Any:
        return self.chrome.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return str(self.one(name).text)

    def set(self, name: str, value: object) -> None:
        field = self.one(name)
        field.clear()
        field.send_keys(str(value))

    def run(self, **fields: object) -> None:
        for name, value in fields.items():
            self.set(name, value)
        self.one("run").click()

    def wait(self, condition: Any, seconds: float = 600.0) -> None:
        waiting = WebDriverWait(self.chrome, seconds, poll_frequency=0.02)
        waiting.until(lambda _: condition(), f"after {seconds} s: {self.text('status')!r}")

    def wait_finished(self) -> None:
        self.wait(lambda: self.text("status").startswith("Finished"))

    def state(self) -> dict[str, Any]:
        """Return what export would write."""
        return dict(json.loads(self.chrome.execute_script("return JSON.stringify(run)")))

    def shoot(self, name: str) -> None:
        folder = os.environ.get("BATON_SCREENSHOTS")
        if folder:
            self.chrome.save_screenshot(str(Path(folder) / f"playground-{name}.png"))


@pytest.fixture
def page(browser: Any, local: Any) -> Iterator[Page]:
    made = Page(browser, local.url)
    made.open()
    yield made
    refused = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    allowed = [e for e in refused if " 400 " in e["message"] or "favicon" in e["message"]]
    assert refused == allowed, refused


def test_every_token_shows_its_own_probability_and_rank(page: Page) -> None:
    page.run(max_tokens=24)
    page.wait_finished()
    shown, state = page.find("#tokens .token"), page.state()
    assert len(shown) == len(state["tokens"]) == state["usage"]["completion_tokens"] > 1
    for index in (0, len(shown) // 2, len(shown) - 1):
        ActionChains(page.chrome).move_to_element(shown[index]).perform()
        facts = dict(
            zip(
                [e.text for e in page.find("#d_facts dt")],
                [e.text for e in page.find("#d_facts dd")],
                strict=True,
            )
        )
        token = state["tokens"][index]
        assert float(facts["logprob"]) == pytest.approx(token["logprob"], abs=1e-4)
        assert facts["rank"] == str(token["rank"])
        assert facts["position"] == str(index)
        assert len(page.find("#alternatives li")) >= 5
    page.shoot("hover")


def test_ranks_agree_with_the_alternatives(page: Page) -> None:
    page.run(max_tokens=30, temperature=1.5, seed=3)
    page.wait_finished()
    tokens = page.state()["tokens"]
    for token in tokens:
        better = sum(top["logprob"] > token["logprob"] for top in token["top"])
        assert token["rank"] == better + 1 if better < 5 else token["rank"] > 5
    assert len({token["rank"] for token in tokens}) > 1


def test_colour_follows_probability(page: Page) -> None:
    page.run(max_tokens=30, temperature=1.2, seed=5)
    page.wait_finished()
    tokens = page.state()["tokens"]
    likely = max(range(len(tokens)), key=lambda i: tokens[i]["logprob"])
    unlikely = min(range(len(tokens)), key=lambda i: tokens[i]["logprob"])
    spans = page.find("#tokens .token")
    colours = [spans[i].value_of_css_property("background-color") for i in (likely, unlikely)]
    assert colours[0] != colours[1]
    style = spans[unlikely].get_attribute("style")
    share = float(re.search(r"--sure\) ([0-9.]+)%", style)[1])
    assert share == pytest.approx(100 * math.exp(tokens[unlikely]["logprob"]), abs=0.06)


def test_drafts_are_marked_as_the_usage_counts_them(page: Page) -> None:
    page.run(max_tokens=60)
    page.wait_finished()
    state = page.state()
    details = state["usage"]["completion_tokens_details"]
    assert len(page.find("#tokens .token.drafted")) == details["accepted_prediction_tokens"] > 0
    rejected = sum(step["n_proposed"] for step in state["steps"])
    rejected -= details["accepted_prediction_tokens"]
    assert rejected == details["rejected_prediction_tokens"]
    assert bool(page.find("#tokens .rejected")) == bool(rejected)
    assert not page.find("#tokens .rejected.unnamed"), "each rejected draft has a name"
    assert all(len(s["verified_drafts"]) == s["n_proposed"] for s in state["steps"])
    assert len(page.find("#drafts .proposed")) == len(state["steps"]) - 1


def test_the_handover_stands_after_the_first_token(page: Page) -> None:
    page.run(max_tokens=8)
    page.wait_finished()
    kinds = [e.get_attribute("class").split()[0] for e in page.find("#tokens > span")]
    assert [k for k in kinds if k != "rejected"][:3] == ["token", "baton", "token"]
    assert [s["computed_by"] for s in page.state()["steps"]][:2] == ["prefill", "decode"]


def test_completions_stream_too(page: Page) -> None:
    page.chrome.find_element(By.CSS_SELECTOR, "input[value=completion]").click()
    page.run(prompt="You may copy", max_tokens=12, top_logprobs=3)
    page.wait_finished()
    state = page.state()
    assert state["path"] == "/v1/completions"
    assert len(page.find("#tokens .token")) == state["usage"]["completion_tokens"]
    assert all(len(t["top"]) >= 3 and t["rank"] >= 1 for t in state["tokens"])


_ESCAPE_AFTER_120_TOKENS = """
new MutationObserver((_, observer) => {
  if (document.querySelectorAll("#tokens .token").length <= 120) return;
  observer.disconnect();
  window.statusAtEscape = document.getElementById("status").textContent;
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
}).observe(document.getElementById("tokens"), { childList: true, subtree: true });
"""
"""Pressed by the page itself: the driver's round trips can outlast the whole answer."""


def test_tokens_appear_before_the_answer_is_complete_and_escape_stops_it(page: Page) -> None:
    page.one("ignore_eos").click()
    page.chrome.execute_script(_ESCAPE_AFTER_120_TOKENS)
    page.run(max_tokens=900, temperature=0.6)
    page.wait(lambda: page.text("status") in ("Stopped.", "Finished: length"))
    page.shoot("streaming")
    assert page.text("status") == "Stopped."
    assert page.chrome.execute_script("return window.statusAtEscape") == "Streaming…"
    assert 120 < len(page.find("#tokens .token")) < 900
    assert page.state()["usage"] is None
    assert page.one("run").is_enabled()


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    prompt = page.one("prompt")
    page.wait(lambda: page.chrome.switch_to.active_element == prompt)
    prompt.send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait_finished()
    page.one("export").send_keys(Keys.TAB)
    page.chrome.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find("#tokens .token[aria-selected=true]")[0].get_attribute("data-index") == "2"
    page.chrome.switch_to.active_element.send_keys(Keys.END)
    last = len(page.find("#tokens .token")) - 1
    active = page.chrome.switch_to.active_element
    assert active.get_attribute("data-index") == str(last)


def test_a_refusal_is_shown_in_the_gateways_words(page: Page) -> None:
    page.chrome.execute_script("document.getElementById('top_logprobs').max = 99")
    page.run(top_logprobs=50)
    page.wait(lambda: "the most is 20" in page.text("status"))
    assert "bad" in page.one("status").get_attribute("class")


def test_export_writes_what_is_on_the_screen(page: Page) -> None:
    page.run(max_tokens=10)
    page.wait_finished()
    page.one("export").click()
    exported: dict[str, Any] = {}

    def is_written() -> bool:
        for path in page.chrome.downloads.glob("baton-*.json"):
            with contextlib.suppress(json.JSONDecodeError):  # half of it, so far
                exported.update(json.loads(path.read_text()))
        return bool(exported)

    page.wait(is_written)
    assert exported == page.state()
    assert "".join(t["token"] for t in exported["tokens"])
    assert "key" not in json.dumps(exported["request"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(page: Page, theme: str) -> None:
    page.open(NARROW, theme)
    page.run(max_tokens=40)
    page.wait_finished()
    page.chrome.execute_script("document.getElementById('output').scrollIntoView()")
    width = page.chrome.execute_script("return document.documentElement.scrollWidth")
    assert width <= NARROW[0]
    page.shoot(f"narrow-{theme}")


def test_dark_follows_the_system_and_the_button_overrides_it(page: Page) -> None:
    page.open(theme="dark")
    dark = page.chrome.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    page.one("theme").click()
    light = page.chrome.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert page.text("theme") == "Theme: light"
    assert dark != light


def test_the_page_may_load_nothing_from_elsewhere(local: Any) -> None:
    reply = httpx.get(f"{local.url}/playground")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in reply.text


def test_an_injected_script_does_not_run(page: Page) -> None:
    page.chrome.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1';"
        "document.body.append(s)"
    )
    assert page.chrome.execute_script("return window.injected") is None
    said: list[str] = []

    def is_refused() -> bool:
        said.extend(entry["message"] for entry in page.chrome.get_log("browser"))
        return any("Content Security Policy" in message for message in said)

    page.wait(is_refused)
