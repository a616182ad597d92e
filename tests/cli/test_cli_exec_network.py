"""`rookery exec --allow`: only named hosts are reachable, for root and for unprivileged users."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.sandbox_kit import local_sandboxes, own_folder, run_cli, run_cli_as

__all__ = ["local_sandboxes", "own_folder"]

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_only_allowed_hosts_are_reachable(port: int, tmp_path: Path) -> None:
    url = f"http://localhost:{port}/"
    done = run_cli("exec", "--allow", f"localhost:{port}", "--", "python3", "-c", FETCH, url, cwd=tmp_path)
    assert (done.code, done.out) == (0, "hello\n"), done.err
    done = run_cli("exec", "--allow", "a.invalid", "--", "python3", "-c", FETCH, url, cwd=tmp_path)
    assert done.code == 1
    assert "refused" in done.err
    done = run_cli("exec", "--allow", "a.invalid", "--", "python3", "-c", FETCH, "http://b.invalid", cwd=tmp_path)
    assert "HTTP Error 403" in done.err


@pytest.mark.usefixtures("local_sandboxes")
def test_allowed_hosts_work_for_an_unprivileged_user(
    port: int, own_folder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, user = own_folder
    monkeypatch.setenv("TMPDIR", str(folder))
    url = f"http://localhost:{port}/"
    done = run_cli_as(user, "exec", "--allow", f"localhost:{port}", "--", "python3", "-c", FETCH, url, cwd=folder)
    assert (done.code, done.out) == (0, "hello\n"), done.err
    done = run_cli_as(user, "exec", "--network", "model", "--", "python3", "-c", FETCH, url, cwd=folder)
    assert (done.code, done.out) == (1, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--allow", "http://a.invalid"], "'http://a.invalid'"),
        (["--allow", "a.invalid", "--allow", "b.invalid:0"], "'b.invalid:0'"),
        (["--allow", ""], "''"),
        (["--network", "allow"], "'allow'"),
        (["--network", "none", "--allow", "a.invalid"], "a.invalid ... 'allow' ... 'none'"),
        (["--unsafe", "--allow", "a b"], "'a b'"),
        (["--provider", "subprocess", "--allow", "a.invalid"], "subprocess ... network"),
    ],
)
def test_invalid_allow_rule_is_one_sentence_and_exit_code_125(args: list[str], named: str, tmp_path: Path) -> None:
    done = run_cli("exec", *args, "--", "true", cwd=tmp_path)
    assert (done.code, done.out) == (125, "")
    (line,) = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert all(name in line for name in named.split(" ... "))
    assert "doctor" not in line
