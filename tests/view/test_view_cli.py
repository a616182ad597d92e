"""Tests of the command `rookery view`."""

import asyncio
import json
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.cli.helpers import rookery, start_command, wait_for_end
from tests.view.view_kit import make_run, simple_turns


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    turns = {"0.0": simple_turns("0.0", "</script><script>alert(1)</script>")}
    make_run(tmp_path / "runs" / "one", {"t0": [1, 0, None], "t1": [1]}, turns=turns)
    return tmp_path


async def test_view_prints_a_url_that_works_and_ends_on_sigint(runs: Path) -> None:
    async with start_command("view", "--port", "0", cwd=runs) as process, asyncio.timeout(60):
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as http:
            async with http.get(url) as response:
                assert response.status == 200
                assert "app.js" in await response.text()
            base, key = url.split("/?key=")
            async with http.get(f"{base}/app.js") as response:
                assert response.content_type == "text/javascript"
            headers = {"Authorization": f"Bearer {key}"}
            async with http.get(f"{base}/api/runs", headers=headers) as response:
                assert [run["id"] for run in (await response.json())["runs"]] == ["one"]
        process.send_signal(signal.SIGINT)
        assert (await wait_for_end(process)).code == 0


async def test_export_holds_the_chosen_rollouts_and_no_foreign_script(runs: Path) -> None:
    done = await rookery("view", "one", "--export", "out.html", "--rollout", "0.0", "--rollout", "r0.2", cwd=runs)
    assert done.code == 0, done.err
    page = (runs / "out.html").read_text()
    assert len(re.findall("<script", page)) == 2
    embedded = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    rollouts = [path for path in embedded["answers"] if path.startswith("/api/rollout?")]
    assert rollouts == ["/api/rollout?run=one&id=0.0", "/api/rollout?run=one&id=0.2"]
    response = embedded["answers"][rollouts[0]]["turns"][0]["response"]
    assert response["content"] == "</script><script>alert(1)</script>"
    failed = await rookery("view", "one", "--export", "failed.html", "--failed", cwd=runs)
    assert "1 rollout," in failed.out


async def test_view_refuses_wrong_arguments(runs: Path) -> None:
    (await rookery("view", "zzz", cwd=runs)).assert_refused("zzz")
    (await rookery("view", "--failed", cwd=runs)).assert_refused("--export")
    (await rookery("view", "--export", "x.html", cwd=runs)).assert_refused("--export")
    (await rookery("view", "one", "--export", "x.html", "--rollout", "7.7", cwd=runs)).assert_refused("7.7")
    (await rookery("view", "one", "--export", "no/x.html", cwd=runs)).assert_refused("no/x.html")
    (await rookery("view", "one", "--export", "x.html", "--label", "none", cwd=runs)).assert_refused("one")
    assert not (runs / "x.html").exists()
