"""Tests of the viewer's page in a real Chromium: pages of a real run, hostile transcripts, large runs, exports."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from rookery import Engine, ToolEnvironment
from rookery.core import Message, Rollout, ToolCall, Turn, floats, ints
from rookery.journal import Journal, RunReader, load_segments
from rookery.view.catalogue import Catalogue
from rookery.view.data import RunData
from rookery.view.export import Selection, export_html
from rookery.view.runs import open_viewed_run
from rookery.view.server import ViewServer
from tests.cli.helpers import environ
from tests.servers import ModelServer
from tests.view.big_runs import make_big_table, make_long_rollout
from tests.view.browser import Browser, Tab, start_browser
from tests.view.test_comparison import make_training_run
from tests.view.view_kit import make_run, simple_turns

pytestmark = pytest.mark.viewer
READY = "document.querySelector('main') && !document.querySelector('[aria-busy]')"


@asynccontextmanager
async def viewing(root: Path, folder: Path) -> AsyncIterator[tuple[str, Browser]]:
    folder.mkdir(exist_ok=True)
    async with ViewServer(Catalogue(root, [])) as server, start_browser(folder) as browser:
        yield server.url, browser


async def visit(tab: Tab, url: str) -> str:
    """Open a page, wait until it shows its data, and return its text."""
    await tab.open(url)
    await wait_for_page(tab, url.partition("#")[1] + url.partition("#")[2])
    return await tab.text()


async def wait_for_page(tab: Tab, route: str) -> None:
    """Wait until the page of a route shows its data. The address changes before the page does."""
    shown = f"document.querySelector('[data-route]').dataset.route === {json.dumps(route)}"
    await tab.wait_for(f"location.hash === {json.dumps(route)} && {shown} && {READY}")


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the built-in environment with the embedded policy; return the directory of runs."""
    root = tmp_path_factory.mktemp("real")
    command = [sys.executable, "-m", "rookery.cli", "run", "arithmetic", "--policy", "embedded"]
    command += ["--sandbox", "subprocess", "--unsafe", "--top-logprobs", "3"]
    subprocess.run(
        [*command, "-n", "4", "-k", "3", "--seed", "3", "-o", str(root)],
        check=True,
        capture_output=True,
        env=environ(),
        timeout=120,
    )
    return root


async def test_every_page_shows_what_the_journal_says(real_run: Path, tmp_path: Path) -> None:
    with RunReader((real_run / "latest").resolve()) as reader:
        run, records = reader.folder.name, list(reader.iter_rollouts())
        turns = {record.id: reader.turns(record) for record in records}
        segments = {record.id: load_segments(record, reader.tokens).segments for record in records}
    async with viewing(real_run, tmp_path / "browser") as (url, browser):
        tab = await browser.new_tab()
        await visit(tab, url)
        await tab.wait_for_text(run)
        await tab.click(f"a[href='#/run/{run}']")
        await tab.wait_for_text("Pass rate")
        await tab.wait_for("document.querySelectorAll('.chart svg').length >= 3")
        rewards = [record.reward for record in records if record.reward is not None]
        assert f"{100 * sum(rewards) / len(rewards):.1f}%" in await tab.text()

        await tab.click(f"a[href='#/run/{run}/rollouts']")
        await tab.wait_for("document.querySelectorAll('.grid-row').length === 12")
        shown = await tab.evaluate("[...document.querySelectorAll('.grid-row')].map(row => row.innerText)")
        for record, row in zip(records, shown, strict=True):
            cells = row.split("\n")
            assert cells[0] == record.id
            assert cells[1] == record.task
            assert float(cells[3]) == record.reward

        record = max(records, key=lambda one: len(turns[one.id]))
        await tab.click(f".grid a[href='#/run/{run}/rollout/{record.id}']")
        await tab.wait_for("document.querySelectorAll('.message').length > 1")
        transcript = _squeeze(await tab.text())
        for turn in turns[record.id]:
            for message in (*turn.messages, turn.response):
                assert _squeeze(message.text) in transcript
                for call in message.tool_calls:
                    assert call.name in transcript
        for usage in record.attempts[-1].sandboxes:
            assert usage.id in transcript
            assert usage.commands > 0

        await tab.press("t")
        await tab.wait_for("document.querySelectorAll('.strip .token').length > 5")
        part = segments[record.id][0]
        assert await tab.evaluate("document.querySelectorAll('.strip .token').length") == len(part)
        await tab.evaluate("location.hash += '?color=mask'")
        await tab.wait_for("document.querySelector('.strip .trains')")
        assert await tab.evaluate("document.querySelectorAll('.strip .trains').length") == part.trained
        first = "document.querySelector('.strip .trains')"
        await tab.evaluate(f"{first}.dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
        await tab.wait_for("document.querySelectorAll('.alternative').length === 3")
        await tab.evaluate("document.querySelector('.strip').focus()")
        await tab.press("ArrowRight")
        second = list(part.mask).index(1) + 1
        await tab.wait_for(f"document.querySelector('.token-info').innerText.includes('position {second} ')")

        await tab.click(f"a[href='#/run/{run}/group/{record.group}']")
        await tab.wait_for("document.querySelectorAll('.side').length === 3")
        members = [one for one in records if one.group == record.group]
        for member in members:
            assert member.id in await tab.text()
        assert tab.errors == []


async def test_filters_sort_search_and_keyboard_work_and_are_in_the_url(tmp_path: Path) -> None:
    rewards = {f"t{n}": [n / 10, None if n == 3 else 1 - n / 10] for n in range(8)}
    make_run(
        tmp_path / "runs" / "one",
        rewards,
        turns={"5.1": simple_turns("5.1", "there is a NEEDLE here")},
        truncated=["1.0"],
    )
    make_run(tmp_path / "runs" / "mix", {"words/a": [1], "sums/b": [0]})
    async with viewing(tmp_path / "runs", tmp_path / "browser") as (url, browser):
        tab = await browser.new_tab()
        rows = "[...document.querySelectorAll('.grid-row')].map(row => row.innerText.split('\\n')[0])"

        async def rows_become(*ids: str) -> None:
            await tab.wait_for(f"JSON.stringify({rows}) === {json.dumps(json.dumps(ids, separators=(',', ':')))}")

        assert "Environments" in await visit(tab, f"{url}#/run/mix")
        await tab.evaluate("location.hash = '#/run/mix/rollouts?environment=words'")
        await rows_become("0.0")
        await visit(tab, f"{url}#/run/one/rollouts?label=sandbox.lost")
        await rows_become("3.1")
        await tab.evaluate("location.hash = '#/run/one/rollouts?task=t5&sort=reward&order=desc'")
        await rows_become("5.0", "5.1")
        await tab.evaluate("location.hash = '#/run/one/rollouts?q=needle'")
        await rows_become("5.1")
        await tab.evaluate("location.hash = '#/run/one/rollouts?metric=metric:level&min=6&max=6.5'")
        await rows_become("6.0", "6.1")
        await tab.evaluate("location.hash = '#/run/one/rollouts'")
        await tab.wait_for(f"{rows}.length === 16")
        await tab.click(".bar:not(:disabled)")  # the lowest rewards
        await rows_become("0.0")
        assert "low=0" in await tab.evaluate("location.hash")
        await tab.evaluate("location.hash = '#/run/one/rollouts'")
        await tab.wait_for(f"{rows}.length === 16")
        await tab.evaluate("document.querySelector('.grid').focus()")
        for key in ("ArrowDown", "j", "k", "Enter"):
            await tab.press(key)
        await wait_for_page(tab, "#/run/one/rollout/0.1")
        await tab.press("k")
        await wait_for_page(tab, "#/run/one/rollout/0.0")
        await tab.press("u")
        await wait_for_page(tab, "#/run/one/rollouts")
        assert "sandbox.lost" in await visit(tab, f"{url}#/run/one/rollout/3.1")
        assert "boom" in await tab.evaluate("document.querySelector('.failure pre').innerText")
        assert tab.errors == []


async def test_pages_update_while_a_run_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", {"t0": [1, 0]})
    make_training_run(tmp_path / "runs", "training")
    make_run(tmp_path / "runs" / "two", {"t0": [1, 1]}, config={"seed": 4})
    async with viewing(tmp_path / "runs", tmp_path / "browser") as (url, browser):
        tab = await browser.new_tab()
        await visit(tab, f"{url}#/run/one/rollouts")
        await tab.wait_for("document.querySelectorAll('.grid-row').length === 2")
        with RunReader(run) as reader:
            record = reader.rollout("0.0")
        assert record is not None
        with Journal.open(run) as journal:
            journal.add_rollout(
                Rollout(id="4.0", group=4, member=0, task="new", outcome=record.outcome, reward=0.5)
            )
        await tab.wait_for("document.querySelectorAll('.grid-row').length === 3")
        assert "held-out reward" in await visit(tab, f"{url}#/run/training")
        await visit(tab, f"{url}#/compare?a=one&b=two")
        await tab.wait_for_text("seed")
        await tab.wait_for_text("+0.5")  # of the task in both runs
        async with (
            ModelServer("42") as model,
            Engine(ToolEnvironment(), policy=model.url, runners=0, out=tmp_path / "runs") as engine,
        ):
            assert engine.folder is not None
            await visit(tab, f"{url}#/run/{engine.folder.name}")
            for text in ("Open sandboxes", "1 of 1 replicas healthy", "Staleness"):
                await tab.wait_for_text(text)
        assert tab.errors == []


# ---- hostile transcripts

HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><svg onload='window.pwned = 1'>"
    "</script><script>window.pwned = 1</script><!--<script>--> {{constructor.constructor('window.pwned = 1')()}} "
    "\x1b[2J\x1b]0;title\x07 \u202edesrever\u202c zero\u200bwidth \u2028 \ud800 javascript:alert(1)"
)
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)


def hostile_turns(rollout_id: str) -> list[Turn]:
    text = HOSTILE.replace("\ud800", "")
    script = "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9IndpbmRvdy5wd25lZD0xIi8+"
    parts = (
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": PIXEL}},
        {"type": "image_url", "image_url": {"url": script}},
        {"type": "image_url", "image_url": {"url": "http://192.0.2.1/tracker.png"}},
        {"type": "image_url", "image_url": {"url": "javascript:window.pwned=1"}},
    )
    patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <b>\n+new <script>window.pwned=1</script>\n"
    call = ToolCall("c1", text[:60], json.dumps({"code": f"import os\nprint('{text}')", "patch": patch}))
    return [
        Turn(
            attempt=f"{rollout_id}.1",
            index=0,
            messages=(Message("user", parts), Message("tool", patch), Message("tool", "x" * (10 << 20))),
            response=Message(
                "assistant", text, (call, ToolCall("c2", "broken", "{not json <script>")), reasoning=text
            ),
            prompt=ints([60, 115]),
            sampled=ints([60, 27, 0xE2]),
            logprobs=floats([-0.1, -3.0, -9.0]),
            prompt_tokens=2,
            sampled_tokens=3,
        )
    ]


def make_hostile_run(folder: Path) -> Path:
    name = "<img src=x onerror='window.pwned=1'>\u202e"
    config = {"upstreams": {"policy": {"kind": "embedded"}}, "note": HOSTILE.replace("\ud800", "")}
    return make_run(
        folder, {name: [1, None]}, turns={"0.0": hostile_turns("0.0")}, config=config, data={"x": name}
    )


async def assert_harmless(tab: Tab, scripts: int) -> None:
    assert await tab.evaluate("window.pwned ?? null") is None
    assert await tab.evaluate("document.querySelectorAll('script').length") == scripts
    assert await tab.evaluate("document.querySelectorAll('iframe, object, embed, svg[onload]').length") == 0
    text = await tab.evaluate("document.documentElement.outerHTML")
    for char in ("\x1b", "\u202e", "\u200b", "\x07"):
        assert char not in text


async def test_hostile_transcripts_are_shown_as_text(tmp_path: Path) -> None:
    make_hostile_run(tmp_path / "runs" / "bad")
    async with viewing(tmp_path / "runs", tmp_path / "browser") as (url, browser):
        tab = await browser.new_tab()
        for page in ("", "/rollouts", "/group/0", "/rollout/0.0", "/rollout/0.1", "/rollout/0.0/tokens"):
            await visit(tab, f"{url}#/run/bad{page}")
            await assert_harmless(tab, 1)
        await visit(tab, f"{url}#/run/bad/rollout/0.0?reasoning=1")
        await tab.wait_for("document.querySelectorAll('.message').length === 4")
        assert "<script>window.pwned = 1</script>" in await tab.text()
        assert "\\x1b[2J" in await tab.text()
        assert "\\u202e" in await tab.text()
        assert await tab.evaluate("[...document.images].map(image => image.src)") == [PIXEL]
        assert await tab.evaluate("document.querySelectorAll('.diff-added').length") > 0
        assert await tab.evaluate("document.body.innerText.length") < 100_000  # the long line is shortened
        await tab.evaluate("[...document.querySelectorAll('.more button')].forEach(button => button.click())")
        await tab.wait_for("document.body.innerText.length > 100_000")
        await assert_harmless(tab, 1)
        assert tab.errors == []
        # Even a script that got into the page would not run.
        script = "Object.assign(document.createElement('script'), {textContent: 'window.pwned=1'})"
        await tab.evaluate(f"document.body.append({script})")
        assert await tab.evaluate("window.pwned ?? null") is None
        assert any("Content Security Policy" in error for error in tab.errors)


async def test_export_is_one_harmless_file(tmp_path: Path) -> None:
    run = open_viewed_run(make_hostile_run(tmp_path / "runs" / "bad"))
    target = tmp_path / "out.html"
    with RunData(run, run.journals[0]) as data:
        assert export_html(data, target, Selection()) == 2
    browser_folder = tmp_path / "browser"
    browser_folder.mkdir()
    async with start_browser(browser_folder) as browser:
        tab = await browser.new_tab()
        url = f"file://{quote(str(target))}"
        for page in (
            "",
            "#/run/bad/rollouts",
            "#/run/bad/rollout/0.0",
            "#/run/bad/rollout/0.0/tokens",
            "#/run/bad/group/0",
        ):
            await visit(tab, url + page)
            assert await tab.evaluate("window.pwned ?? null") is None
            assert await tab.evaluate("document.querySelectorAll('script').length") == 2
        await visit(tab, f"{url}#/run/bad/rollout/0.0")
        assert "<script>window.pwned = 1</script>" in await tab.text()
        assert tab.errors == []


# ---- large runs


async def test_large_table_and_long_rollout_open_quickly(tmp_path: Path) -> None:
    """Each wait has a generous limit because the machine may be busy; docs/guides/view.md has the measured
    times."""
    make_big_table(tmp_path / "runs" / "table", 100_000)
    make_long_rollout(tmp_path / "runs" / "long", 500, 5 << 20)
    async with viewing(tmp_path / "runs", tmp_path / "browser") as (url, browser):
        tab = await browser.new_tab()
        await visit(tab, f"{url}#/")
        began = time.monotonic()
        await tab.evaluate("location.hash = '#/run/table/rollouts'")
        await tab.wait_for_text("100,000 of 100,000 rollouts")
        table_seconds = time.monotonic() - began
        assert await tab.evaluate("document.querySelectorAll('.grid-row').length") < 100
        # Scroll to the end: the last row is there, and few rows are in the document.
        await tab.evaluate("document.querySelector('.grid').scrollTop = 1e9")
        await tab.wait_for("[...document.querySelectorAll('.grid-row')].at(-1).innerText.startsWith('12499.7')")
        began = time.monotonic()
        await tab.evaluate("location.hash = '#/run/table/rollouts?sort=metric:length&order=desc&label=completed'")
        await tab.wait_for_text("98,000 of 100,000 rollouts")
        sort_seconds = time.monotonic() - began
        began = time.monotonic()
        await tab.evaluate("location.hash = '#/run/long/rollout/0.0'")
        await tab.wait_for("document.querySelectorAll('.turn').length === 500")
        rollout_seconds = time.monotonic() - began
        print(f"table {table_seconds:.2f} s, sort {sort_seconds:.2f} s, rollout {rollout_seconds:.2f} s")
        assert tab.errors == []


def _squeeze(text: str) -> str:
    return " ".join(text.replace("↵", "").split())
