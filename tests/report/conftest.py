"""One headless Chromium for all pages, and a page in it that tells what went wrong.

The browser is the system's: `chromium`, `chromium-browser` or `google-chrome` on the path. The tests that need it are
skipped where there is none.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no browser on this machine ({', '.join(NAMES)}): install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--in-process-gpu"]
        )
        yield found
        found.close()


@dataclass
class Opened:
    """A page, and what it told, failed at and asked for while it was open."""

    page: Page
    address: str
    told: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a page of Playwright has."""
        return getattr(self.page, name)

    def text(self, selector: str) -> str:
        return self.locator(selector).inner_text()

    def button(self, name: str | re.Pattern[str], **options: Any) -> Locator:
        return self.get_by_role("button", name=name, **options)

    def checkbox(self, name: str | re.Pattern[str], **options: Any) -> Locator:
        return self.get_by_role("checkbox", name=name, **options)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def settle(self) -> None:
        """Wait until what was asked for is drawn: the page draws with the frame after a change."""
        self.page.evaluate(
            "() => new Promise((done) => { let left = 3;"
            " const next = () => (left-- ? requestAnimationFrame(next) : done()); next(); })"
        )

    def assert_clean(self) -> None:
        """The console is empty, nothing was thrown, and nothing but the page itself was loaded."""
        assert self.told == []
        assert self.requests == [self.address]


@pytest.fixture(scope="session")
def pages(browser: Browser) -> Callable[..., Page]:
    """Give a window by its number and options; it is opened once, since opening takes longer than most tests."""
    opened: dict[tuple[object, ...], Page] = {}

    def get(number: int, **options: Any) -> Page:
        key = (number, *sorted(options.items()))
        if key not in opened:
            opened[key] = browser.new_context(reduced_motion="reduce", **options).new_page()
        return opened[key]

    return get


@pytest.fixture
def show(pages: Callable[..., Page], tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open HTML as a file in a window that shows nothing else; options are those of a Playwright context."""
    shown: list[tuple[Page, dict[str, Callable[[Any], None]]]] = []

    def opened(html: str, *, width: int = 1280, **options: Any) -> Opened:
        file = tmp_path / f"page{len(shown)}.html"
        file.write_text(html, encoding="utf-8")
        page = pages(len(shown), **options)
        page.set_viewport_size({"width": width, "height": 900})
        page.mouse.move(0, 0)
        found = Opened(page, file.as_uri())
        listeners: dict[str, Callable[[Any], None]] = {
            "console": lambda message: found.told.append(f"{message.type}: {message.text}"),
            "pageerror": lambda error: found.told.append(f"thrown: {error}"),
            "request": lambda request: found.requests.append(request.url),
        }
        for event, listener in listeners.items():
            page.on(event, listener)  # type: ignore[call-overload]
        shown.append((page, listeners))
        page.goto(found.address)
        found.settle()
        return found

    yield opened
    for page, listeners in shown:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page.emulate_media(color_scheme="light", media="null")
