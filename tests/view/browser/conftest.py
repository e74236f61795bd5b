"""A real Chromium, and the page from both of its hosts: the server, and one file."""

import asyncio
import contextlib
import os
import shutil
import threading

import pytest

from agentenv.view.server import ViewOptions, ViewServer, view_access
from agentenv.view.single_file import FileOptions, write_html
from agentenv.view.viewed import find_runs
from tests.view.page_runs import play, save, siblings_run, small_run, train_run
from tests.view.viewed_runs import tiny_math

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    """A Chromium of this machine. It ends with its file: while it lives, no event loop can run in this thread."""
    api = pytest.importorskip("playwright.sync_api", reason="the page is tested with `pip install playwright`")
    path = os.environ.get("AGENTENV_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("no browser: `apt-get install --no-install-recommends chromium fonts-dejavu-core`")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def serving(*folders, token=None):
    """The address of a server of these runs, which runs in a thread of its own."""
    loop, started, found = asyncio.new_event_loop(), threading.Event(), {}

    async def serve():
        found["stop"] = asyncio.Event()
        options = ViewOptions(view_access("127.0.0.1", token, ()))
        async with ViewServer(find_runs(list(map(str, folders))), options) as server:
            found["address"] = server.address()
            started.set()
            await found["stop"].wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield found["address"]
    finally:
        loop.call_soon_threadsafe(found["stop"].set)
        thread.join(60)
        loop.close()


class Watched:
    """A page that notes whatever should not happen."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)  # of a busy machine
        self.faults, self.requests = [], []
        self.page.on("console", lambda said: said.type == "error" and self.faults.append(said.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address, place=""):
        self.origin = address.split("#")[0]
        self.page.goto("about:blank")  # else only the fragment changes, and nothing is loaded
        self.page.goto(self.origin + (f"#{place}" if place else ""))
        return self.page

    def check(self):
        """No fault, and no request to another origin."""
        assert not self.faults
        foreign = [url for url in self.requests if not url.startswith((self.origin, "about:", "data:"))]
        assert not foreign


@pytest.fixture
def watched(browser):
    """Make pages; each must be without fault at the end."""
    made = []

    def make(**options):
        made.append(Watched(browser, **options))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.context.close()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_math()


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer):
    """A small run, one of five siblings, one to compare the first with, and a training."""
    root = tmp_path_factory.mktemp("runs")
    better = [play(tokenizer, f"{task}/{k}", ("3", 1.0, "", {})) for task in "abc" for k in range(2)]
    return [
        save(root / "small", small_run(tokenizer)),
        save(root / "siblings", siblings_run(tokenizer)),
        save(root / "better", better),
        train_run(root / "train", tokenizer),
    ]


@pytest.fixture(scope="session")
def server_address(folders):
    with serving(*folders) as address:
        yield address


@pytest.fixture(scope="session")
def file_address(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "page.html"
    write_html(find_runs(list(map(str, folders))), path, FileOptions())
    return path.as_uri()


@pytest.fixture(params=["server", "file"])
def address(request):
    """The page of the four runs, from each host."""
    return request.getfixturevalue(f"{request.param}_address")


@pytest.fixture
def opened(watched, address):
    """Open a place of the page, and wait for what stands there."""
    one = watched()

    def open_place(place, selector):
        page = one.open(address, place)
        page.wait_for_selector(selector)
        return page

    return open_place
