"""What a model wrote is the attacker: it stays text, asks for nothing, and runs nothing."""

import re
import shlex
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import url2pathname

import pytest

from agentenv.cli.flags import parse
from agentenv.cli.tokens import ReplayConfig, ShowConfig
from agentenv.cli.view import ViewConfig
from agentenv.view.single_file import FileOptions, write_html
from agentenv.view.viewed import find_runs
from tests.view.browser.conftest import serving
from tests.view.page_runs import save, small_run, train_run
from tests.view.viewed_runs import PAYLOADS, episode, hostile_run, write_run

pytestmark = pytest.mark.slow
SCRIPTS = "script:not([src]):not([type='application/json']):not([type='text/plain'])"
FOREIGN = f"{SCRIPTS}, img, iframe, object, embed, base, form, animate, math, video, audio"
READ = "() => document.querySelector('main') && !/^Reading/.test(document.querySelector('main').innerText)"
HANDLERS = """[...document.querySelectorAll('#app *')].filter(
    node => [...node.attributes].some(each => each.name.startsWith('on'))
).length"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run with a payload in every field, from both hosts."""
    folder = hostile_run(tmp_path_factory.mktemp("hostile") / "<b>run<img src=x onerror=alert(1)>")
    path = tmp_path_factory.mktemp("file") / "page.html"
    write_html(find_runs([str(folder)]), path, FileOptions())
    with serving(folder) as address:
        yield {"server": address, "file": path.as_uri()}


@pytest.mark.parametrize("host", ["server", "file"])
def test_20_payloads_in_every_field_stay_text(watched, hostile, host):
    one = watched()
    ids = [f"{payload}{number}" for number, payload in enumerate(PAYLOADS)]
    ids = [each.encode("utf-8", "replace").decode() for each in ids]
    places = ["/0/overview", "/0/episodes", "/0/training", *(f"/0/task/{quote(each, safe='')}" for each in ids[:6])]
    for each in ids[::3]:
        episode = quote(f"{each}/0", safe="")
        places += [f"/0/episode/{episode}", f"/0/episode/{episode}?tab=messages", f"/0/episode/{episode}?tab=record"]
    for place in places:
        page = one.open(hostile[host], place)
        page.wait_for_function(READ)
        own = 1 if host == "file" else 0  # the page's own script stands in the file
        assert page.locator(f":is({FOREIGN})").count() == own, place
        assert page.evaluate(HANDLERS) == 0, place
    assert "# heading" in page.locator("pre.json").inner_text()


def seen(text):
    """A text as the page writes it, with what cannot be seen by its number."""
    unseen = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]"
    return re.sub(unseen, lambda found: f"\\u{{{ord(found[0]):x}}}", text)


@pytest.mark.parametrize("host", ["server", "file"])
def test_20_each_payload_is_there_letter_by_letter(watched, hostile, host):
    page = watched().open(hostile[host], "/0/overview")
    page.wait_for_selector(".tiles")
    for number, payload in enumerate(PAYLOADS):
        episode = f"{payload}{number}/0".replace("\ud800", "\ufffd")  # as an address has it
        page.evaluate("hash => { location.hash = hash; }", f"/0/episode/{quote(episode, safe='')}?tab=messages")
        said = "text => document.querySelector('.message .text')?.textContent === text"
        page.wait_for_function(said, arg=seen(payload))
        assert set(page.locator(".message .text").all_text_contents()) == {seen(payload)}


@pytest.mark.parametrize("host", ["server", "file"])
def test_20_payloads_in_the_address_stay_text(watched, hostile, host):
    one = watched()
    for payload in ("<img src=x onerror=alert(1)>", "__proto__", "javascript:alert(1)"):
        for place in (
            "/0/task/{}",
            "/0/episode/{}",
            "/0/episodes?q={}",
            "/compare/0/0?by={}",
            "/0/training?step={}&zoom={}",
        ):
            page = one.open(hostile[host], place.format(*[quote(payload, safe="")] * 2))
            page.wait_for_selector(".empty, .grid, .charts, .filter-problem")
            assert page.locator("#app img").count() == 0


HARD_IDS = ("--html=/x", "-1", "it's `$(touch x)`", "--episode", "a b\\/0", "--")


@pytest.mark.parametrize("host", ["server", "file"])
def test_commands_for_any_id_are_read_back_as_that_id(watched, tmp_path_factory, host):
    folder = write_run(tmp_path_factory.mktemp("ids") / "run", *map(episode, HARD_IDS))
    path = folder.parent / "page.html"
    write_html(find_runs([str(folder)]), path, FileOptions())
    with serving(folder) as address:
        one = watched()
        for each in HARD_IDS:
            page = one.open(
                {"server": address, "file": path.as_uri()}[host], f"/0/episode/{quote(each, safe='')}?tab=replay"
            )
            page.wait_for_selector(".command")
            commands = [shlex.split(text) for text in page.locator(".command").all_inner_texts()]
            assert [words[:3] for words in commands[:2]] == [
                ["agentenv", "tokens", name] for name in ("show", "replay")
            ]
            for words, wanted in zip(
                commands, (ShowConfig(str(folder), each), ReplayConfig(str(folder))), strict=False
            ):
                assert parse(type(wanted), "tokens", words[3:]) == wanted
            viewed = parse(ViewConfig, "view", commands[2][2:])
            assert (viewed.runs, viewed.episode, viewed.html) == ((str(folder),), each, None)


def test_commands_wait_for_the_folder_of_the_run(watched, server_address):
    one, held = watched(), []
    one.page.route("**/api/meta*", lambda route: held.append(route))  # it sets a name of it
    page = one.open(server_address, "/0/episode/a%2F1?tab=replay")
    page.get_by_text("Replay", exact=True).wait_for()
    assert page.locator(".command").count() == 0
    for route in held:
        route.continue_()
    page.wait_for_selector(".command")


INJECTED = """
<script>ran.push('script')</script><script src="https://evil.example/x.js"></script>
<img src="https://evil.example/x.png" onerror="ran.push('handler')"><svg onload="ran.push('svg')"></svg>
<iframe src="https://evil.example/"></iframe><iframe srcdoc="<script>parent.ran.push('frame')</script>"></iframe>
<a id="out" href="javascript:ran.push('link')">out</a><style>.top { display: none }</style>
</body>"""
"""What a page would hold if something of the data became markup."""
VIOLATIONS = """
window.ran = [];
window.violations = [];
document.addEventListener('securitypolicyviolation', event => violations.push(event.effectiveDirective));
"""


@pytest.mark.parametrize("host", ["server", "file"])
def test_21_the_policy_blocks_markup_that_is_in_the_page_and_says_so(browser, hostile, tmp_path, host):
    page = browser.new_context().new_page()
    page.add_init_script(VIOLATIONS)
    ended = {}
    page.on("requestfinished", lambda request: ended.update({request.url: "sent"}))
    page.on("requestfailed", lambda request: ended.update({request.url: request.failure}))
    address = hostile[host]
    if host == "file":
        text = Path(url2pathname(urlsplit(address).path)).read_text()
        (tmp_path / "page.html").write_text(text.replace("</body>", INJECTED))
        address = (tmp_path / "page.html").as_uri()
    else:

        def inject(route):
            answer = route.fetch()
            route.fulfill(response=answer, body=answer.text().replace("</body>", INJECTED))

        page.route(address.split("#")[0], inject)
    page.goto(address)
    page.wait_for_selector(".tiles")
    page.locator("#out").evaluate("link => link.click()")
    sent = page.evaluate("fetch('https://evil.example/').then(() => 'sent', () => 'blocked')")
    expected = {"script-src-elem", "script-src-attr", "img-src", "frame-src", "style-src-elem", "connect-src"}
    page.wait_for_function("names => names.every(name => violations.includes(name))", arg=sorted(expected))
    assert sent == "blocked"
    assert page.evaluate("ran") == []
    assert page.locator(".top").is_visible()
    assert {why for url, why in ended.items() if "evil.example" in url} == {"csp"}
    page.context.close()


def test_22_a_token_opens_the_page_and_nothing_else_does(watched, browser, folders):
    with serving(folders[0], token="secret-token") as address:
        one = watched()
        one.origin = address.split("#")[0]
        one.page.goto(address)
        one.page.wait_for_selector(".tiles")
        assert "secret-token" not in one.page.url
        for bad in (address.split("#")[0], address.replace("secret-token", "wrong-token")):
            other = browser.new_context().new_page()
            other.goto(bad)
            other.wait_for_selector("text=Open the address that the command printed")
            assert other.locator(".tiles").count() == 0
            other.context.close()


def test_tokens_are_shown_and_scored_again_of_runs_that_have_them_and_an_engine_that_can(watched, tokenizer, tmp_path):
    engines = ("chat", "hf", "scripted")
    for engine in engines:
        save(tmp_path / engine, small_run(tokenizer), flags={"engine": engine})
    train_run(tmp_path / "train", tokenizer)
    with serving(tmp_path) as address:
        one, offered = watched(), []
        for run, id in enumerate(("a%2F0", "a%2F0", "a%2F0", "t%2F0")):
            page = one.open(address, f"/{run}/episode/{id}?tab=replay")
            page.wait_for_selector(".command")
            commands = page.locator(".commands").inner_text()
            offered += [f"{name} {run}" for name in ("show", "replay") if f"tokens {name}" in commands]
    assert offered == ["show 1", "replay 1", "show 2", "show 3"]
