"""The page at /: its headers, that it needs nothing else, and what it does in a browser."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.server.conftest import PATIENCE_S, QUESTION, ROOT, flags, wait_until
from tests.server.scripted import Scripted, scripted_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import ServerProcess, Start

KEY = "secret"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_server(api_key=KEY) as running:
        yield running


def test_headers_let_nothing_else_run(scripted: Scripted) -> None:
    answer = httpx2.get(f"{scripted.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    # nothing is fetched from elsewhere, and no text becomes markup
    assert not re.search(r"(?:src|href)=\"(?!data:,)", answer.text)
    assert set(re.findall(r"https?://[^\"']+", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|document\.write|localStorage|eval\(", answer.text)
    assert httpx2.post(f"{scripted.url}/", headers={"x-api-key": KEY}).status_code == 405


def test_the_numbers_it_reads_exist(server: ServerProcess) -> None:
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        wait_until(lambda: "gapless:engine_steps_total" in http.get("/metrics").text)
        page, metrics = http.get("/").text, http.get("/metrics").text
    known = set(re.findall(r"^gapless:(\w+)", metrics, re.MULTILINE))
    read = set(re.findall(r"\"(\w+_(?:total|perc|running|waiting|rows|used))\"", page))
    assert len(read) >= 11
    assert read <= known


def test_the_dashboard_asks_for_metrics_that_exist(server: ServerProcess) -> None:
    board = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"gapless:(\w+)", query)}
    assert len(asked) > 25
    labels = set(re.findall(r"by \((\w+)\)", " ".join(queries)))
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        http.post("/v1/chat/completions", json={"messages": QUESTION, "ignore_eos": True})
        wait_until(lambda: "accepted_tokens_per_pos_total" in http.get("/metrics").text)
        metrics = http.get("/metrics").text
    # a counter without a single event shows its family only
    known = set(re.findall(r"^(?:# TYPE )?gapless:(\w+)", metrics, re.MULTILINE))
    assert asked <= known
    assert labels <= set(re.findall(r"(\w+)=\"", metrics))
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in board["panels"]}) == len(places)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None or find_spec("playwright") is None:
        pytest.skip("needs chromium on the path and the package playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        found = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that must not complain; refusals of the server are told to the user."""
    complaints: list[str] = []
    opened = browser.new_page()
    opened.set_default_timeout(PATIENCE_S * 1000)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda said: said.type == "error" and complaints.append(said.text))
    yield opened
    opened.close()
    assert [text for text in complaints if "status of 401" not in text] == []


def turns(page: Any) -> list[str]:
    return page.locator(".turn > .text").all_inner_texts()


def test_a_chat_by_keyboard_with_a_key(scripted: Scripted, page: Any) -> None:
    scripted.say("<think>Hm.</think>", "I am <b>", "fine</b>.")
    page.goto(scripted.url)
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("How are")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you?")
    page.keyboard.press("Enter")
    page.locator(".error", has_text="API key").wait_for()
    # the field for the key has the focus now
    page.keyboard.type(KEY)
    page.locator("#question").fill("How are you?")
    page.keyboard.press("Enter")
    page.locator("#note", has_text="3 tokens").wait_for()
    assert turns(page)[-2:] == ["How are you?", "I am <b>fine</b>."]
    assert page.locator(".turn details summary").inner_text() == "Thoughts"
    page.locator(".turn details summary").press("Enter")
    assert page.locator(".turn details .text").inner_text() == "Hm."
    # the question that was refused is not part of the chat
    assert scripted.prompt == "[user]How are you?[assistant]"
    page.locator("#question").fill("And now?")
    page.keyboard.press("Enter")
    wait_for_prompt(page, scripted, "I am <b>fine</b>.[user]And now?[assistant]")
    page.locator("#send:enabled").wait_for()
    page.locator("#clear").press("Enter")
    assert turns(page) == []
    assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0


def wait_for_prompt(page: Any, scripted: Scripted, end: str) -> None:
    page.locator("#note", has_text="tokens").wait_for()
    wait_until(lambda: scripted.prompt.endswith(end))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(scripted: Scripted, page: Any, scheme: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(scripted.url)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(
        """() => {
          const light = (color) => {
            const [r, g, b] = color.match(/[0-9.]+/g).map((part) => {
              const c = part / 255;
              return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ratio = (text, back) => {
            const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
          };
          const send = getComputedStyle(document.getElementById("send"));
          const body = getComputedStyle(document.body);
          const note = getComputedStyle(document.getElementById("note"));
          return [ratio(send.color, send.backgroundColor), ratio(body.color, body.backgroundColor),
            ratio(note.color, body.backgroundColor)];
        }"""
    )
    assert min(contrasts) > 4.5
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"
    assert dark == (scheme == "dark")


def without_end(route: Any) -> None:
    """Send a request on, with one more field."""
    route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})


def test_stopping_ends_the_work_and_the_charts_move(start: Start, page: Any) -> None:
    server = start(*flags({"max_running_requests": 4, "max_model_len": 4096}))
    server.line("ready")
    page.goto(server.url)
    running = page.get_by_label("Requests", exact=True)
    running.filter(has_text="running 0, waiting 0").wait_for()
    page.route("**/v1/chat/completions", without_end)
    page.locator("#question").fill("Tell me everything.")
    page.keyboard.press("Enter")
    page.locator("#stop:enabled").wait_for()
    running.filter(has_text="running 1").wait_for()
    page.get_by_label("Throughput").filter(has_not_text=re.compile("^0.0")).wait_for()
    page.keyboard.press("Escape")
    page.locator("#note", has_text="stopped").wait_for()
    running.filter(has_text="running 0").wait_for()
    assert turns(page)[1] != ""
    points = page.locator("polyline").first.get_attribute("points")
    assert len({point.split(",")[1] for point in points.split()}) > 1
    assert page.locator("#phase").inner_text() == "ready"
    assert page.locator("#model").inner_text() == "gapless-demo"
