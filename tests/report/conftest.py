"""One headless Chromium for all pages, and a page in it that tells what went wrong.

The browser is the system's: `chromium`, `chromium-browser` or `google-chrome` on the path. The tests that need it are
skipped where there is none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no browser on this machine ({', '.join(NAMES)}): install Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@dataclass
class Opened:
    """A page, and what it told, failed at and asked for while it was open."""

    page: Page
    address: str
    told: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

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


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open HTML as a file in a window of its own; options are those of a Playwright context."""
    contexts = []

    def opened(html: str, *, width: int = 1280, **options: Any) -> Opened:
        file = tmp_path / f"page{len(contexts)}.html"
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        found = Opened(page, file.as_uri())
        page.on("console", lambda message: found.told.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: found.told.append(f"thrown: {error}"))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(found.address)
        found.settle()
        return found

    yield opened
    for context in contexts:
        context.close()
