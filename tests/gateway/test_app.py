"""The routes of a shard: which key each path accepts, which bodies it takes, and the admin API for sessions."""

import asyncio
import socket
from pathlib import Path

import pytest

from rookery.gateway.app import MAX_BODY
from tests.gateway.kit import ADMIN_KEY, InProcessGateway, RawConnection, RegisteredSession, request, run_shard
from tests.gateway.scripted_upstream import ScriptedUpstream

CHAT = {"messages": [{"role": "user", "content": "hi"}]}

# Which key each path accepts, and the status with that key. The key is checked before the method.
ADMIN, OPEN, MODEL = "admin", "open", "model"
TABLE = [
    ("GET", "/", OPEN, 200),
    ("HEAD", "/", OPEN, 200),
    ("POST", "/", OPEN, 405),
    ("GET", "/healthz", OPEN, 200),
    ("HEAD", "/healthz", OPEN, 200),
    ("DELETE", "/healthz", OPEN, 405),
    ("GET", "/metrics", OPEN, 200),
    ("PUT", "/metrics", OPEN, 405),
    ("GET", "/openapi.json", OPEN, 200),
    ("POST", "/openapi.json", OPEN, 405),
    ("GET", "/nowhere", OPEN, 404),
    ("POST", "/chat/completions", OPEN, 404),
    ("POST", "/v1/chat/completions", OPEN, 404),
    ("GET", "/rollouts/one/else", OPEN, 404),
    ("GET", "/v1/models", ADMIN, 200),
    ("HEAD", "/v1/models", ADMIN, 200),
    ("POST", "/v1/models", ADMIN, 405),
    ("GET", "/models", ADMIN, 200),
    ("GET", "/state", ADMIN, 200),
    ("POST", "/state", ADMIN, 405),
    ("POST", "/pause", ADMIN, 200),
    ("GET", "/pause", ADMIN, 405),
    ("POST", "/resume", ADMIN, 200),
    ("GET", "/resume", ADMIN, 405),
    ("GET", "/rollouts", ADMIN, 200),
    ("GET", "/rollouts/", ADMIN, 200),
    ("POST", "/rollouts", ADMIN, 201),
    ("DELETE", "/rollouts", ADMIN, 405),
    ("GET", "/rollouts/one", ADMIN, 200),
    ("PUT", "/rollouts/one", ADMIN, 405),
    ("GET", "/rollouts/nobody", ADMIN, 404),
    ("GET", "/rollouts/one/trajectory", ADMIN, 200),
    ("POST", "/rollouts/one/trajectory", ADMIN, 405),
    ("GET", "/rollouts/nobody/trajectory", ADMIN, 404),
    ("GET", "/rollouts/one/cancel", ADMIN, 405),
    ("POST", "/rollouts/nobody/cancel", ADMIN, 404),
    ("DELETE", "/rollouts/nobody", ADMIN, 404),
    ("GET", "/v1/rollouts/one", MODEL, 200),
    ("HEAD", "/v1/rollouts/one/", MODEL, 200),
    ("GET", "/v1/rollouts/one/v1/", MODEL, 200),
    ("POST", "/v1/rollouts/one", MODEL, 405),
    ("GET", "/v1/rollouts/one/models", MODEL, 200),
    ("GET", "/v1/rollouts/one/v1/models", MODEL, 200),
    ("POST", "/v1/rollouts/one/models", MODEL, 405),
    ("POST", "/v1/rollouts/one/chat/completions", MODEL, 200),
    ("POST", "/v1/rollouts/one/v1/chat/completions", MODEL, 200),
    ("POST", "/v1/rollouts/one/chat/completions/", MODEL, 200),
    ("GET", "/v1/rollouts/one/chat/completions", MODEL, 405),
    ("POST", "/v1/rollouts/one/completions", MODEL, 400),
    ("POST", "/v1/rollouts/one/embeddings", MODEL, 404),
    ("POST", "/v1/rollouts/one/v1/v1/chat/completions", MODEL, 404),
    ("GET", "/v1/rollouts/one/trajectory", MODEL, 404),
    ("POST", "/v1/rollouts/one/cancel", MODEL, 404),
    ("GET", "/v1/rollouts/one/../two", MODEL, 404),
]


@pytest.mark.parametrize("style", ["bearer", "x-api-key"])
async def test_each_path_accepts_only_its_own_kind_of_key(tmp_path: Path, style: str) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        one, two = await gateway.register(id="one"), await gateway.register(id="two")
        keys = {
            "admin": ADMIN_KEY,
            "own": one.secret,
            "other": two.secret,
            "none": None,
            "empty": "",
            "odd": "\xe9",
        }
        opens = {ADMIN: {"admin"}, OPEN: set(keys), MODEL: {"own"}}
        wrong = []
        for method, path, who, status in TABLE:
            for name, key in keys.items():
                status_now = status if name in opens[who] else 401
                headers = {} if key is None or style == "bearer" else {"x-api-key": key}
                body = CHAT if "chat" in path else None
                answer = await gateway.request(
                    method, path, body, key=key if style == "bearer" else None, **headers
                )
                if answer.status != status_now:
                    wrong.append((method, path, name, status_now, answer.status, answer.body))
                elif answer.status >= 400 and method != "HEAD":
                    assert answer.error["message"]
                if answer.status == 401:
                    assert answer.headers["www-authenticate"] == "Bearer"
                if answer.status == 405:
                    assert method not in answer.headers["allow"].split(", ")
                assert key is None or not key or key.encode() not in answer.body, "the response contains a key"
        assert wrong == []


@pytest.mark.parametrize(
    "path", ["", "/", "/models", "/v1/models", "/chat/completions", "/v1/chat/completions", "/nothing"]
)
async def test_unknown_session_is_404_wrong_secret_401_and_ended_session_410(tmp_path: Path, path: str) -> None:
    method = "POST" if "chat" in path else "GET"
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        live = await gateway.register(id="live")
        cancelled, deleted = await gateway.register(id="cancelled"), await gateway.register(id="deleted")
        assert (await gateway.request("POST", "/rollouts/cancelled/cancel")).status == 200
        assert (await gateway.request("DELETE", "/rollouts/deleted")).status == 200

        async def status(session: str, secret: str | None) -> int:
            return (await gateway.request(method, f"/v1/rollouts/{session}{path}", CHAT, key=secret)).status

        for secret in (live.secret, ADMIN_KEY, None):
            assert await status("nobody", secret) == 404
        for session in (live, cancelled, deleted):
            for secret in (ADMIN_KEY, None, "", "rk-", session.secret[:-1], session.secret + "x"):
                assert await status(session.id, secret) == 401
        assert await status("cancelled", live.secret) == await status("live", cancelled.secret) == 401
        assert await status("cancelled", cancelled.secret) == await status("deleted", deleted.secret) == 410
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        assert await status("cancelled", cancelled.secret) == await status("deleted", deleted.secret) == 410
        assert await status("deleted", live.secret) == 401


async def test_unauthorized_request_is_rejected_before_its_body_is_read(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register()
        past = await gateway.register(id="past")
        await gateway.request("DELETE", "/rollouts/past")
        half = b"x" * 100
        for path, key, status in (
            ("/rollouts", None, 401),
            ("/rollouts", session.secret, 401),
            (f"{session.path}/chat/completions", ADMIN_KEY, 401),
            ("/v1/rollouts/past/chat/completions", past.secret, 410),
            ("/v1/rollouts/nobody/chat/completions", session.secret, 404),
            (f"{session.path}/nothing", session.secret, 404),
        ):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with await gateway.connect() as connection:
                connection.send(request("POST", path, b"x" * 10_000, **headers)[:-9_900])
                answer = await connection.read_response()
                assert (answer.status, answer.headers["connection"]) == (status, "close")
            async with await gateway.connect() as connection:
                connection.send(request("POST", path, Transfer_Encoding="chunked", **headers), b"2710\r\n", half)
                assert (await connection.read_response()).status == status


async def test_oversized_body_is_rejected_by_its_content_length(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register()
        for path, key, size in (
            (f"{session.path}/chat/completions", session.secret, MAX_BODY + 1),
            ("/rollouts", ADMIN_KEY, (1 << 20) + 1),
            ("/v1/models", ADMIN_KEY, 1),
        ):
            async with await gateway.connect() as connection:
                method = "GET" if "models" in path else "POST"
                connection.send(request(method, path, Authorization=f"Bearer {key}", Content_Length=str(size)))
                answer = await connection.read_response()
                assert (answer.status, answer.error["code"]) == (413, "request_too_large")


async def listen_for(gateway: InProcessGateway, session: str) -> int:
    sock = socket.create_server(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    assert gateway.shard.server is not None
    await gateway.shard.server.listen(sock, session=session)
    return port


async def test_listener_of_a_session_serves_only_that_session(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        one, two = await gateway.register(id="one"), await gateway.register(id="two")
        port = await listen_for(gateway, "one")

        async def status_at(method: str, path: str, key: str | None = None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
            async with await RawConnection.open(port) as connection:
                body = b'{"messages":[{"role":"user","content":"hi"}]}' if method == "POST" else None
                connection.send(request(method, path, body, Connection="close", **headers))
                return (await connection.read_response(head_only=method == "HEAD")).status

        chats = ["/chat/completions", "/v1/chat/completions", "/v1/rollouts/one/chat/completions"]
        chats += ["/v1/rollouts/one/v1/chat/completions", "/v1/rollouts/%6fne/chat/completions"]
        for path in chats:
            for key in (None, "whatever", one.secret, ADMIN_KEY):
                assert await status_at("POST", path, key) == 200
        for path in ("/", "/models", "/v1/models", "/v1/rollouts/one", "/v1/rollouts/one/models"):
            assert await status_at("GET", path) == await status_at("HEAD", path) == 200
        for path in ("/rollouts", "/rollouts/one/trajectory", "/state", "/healthz", "/metrics", "/openapi.json"):
            assert await status_at("GET", path, ADMIN_KEY) == 404
        for path in ("/rollouts", "/rollouts/one/cancel", "/pause", "/resume"):
            assert await status_at("POST", path, ADMIN_KEY) == 404
        for secret in (two.secret, ADMIN_KEY, None):
            assert await status_at("POST", "/v1/rollouts/two/chat/completions", secret) == 404
        assert len(await gateway.turns(one)) == 4 * len(chats)
        assert await gateway.turns(two) == []
        await gateway.request("POST", "/rollouts/one/cancel")
        assert await status_at("POST", "/chat/completions") == 410
        await gateway.request("DELETE", "/rollouts/one")
        assert await status_at("POST", "/chat/completions") == 410
        assert await status_at("GET", "/") == 410


async def test_base_url_uses_the_requested_host_and_works_with_and_without_v1(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        answer = await gateway.request("POST", "/rollouts", {"id": "a.b:c@d+e=f-g"})
        assert answer.headers["cache-control"] == "no-store"
        session = RegisteredSession(**answer.json)
        assert session.base_url == "http://gateway.test/v1/rollouts/a.b:c@d+e=f-g"
        for path in (session.path, session.path.replace("@", "%40").replace(":", "%3A")):
            for inner in ("", "/v1"):
                response = await gateway.request(
                    "POST", f"{path}{inner}/chat/completions", CHAT, key=session.secret
                )
                assert response.status == 200


@pytest.mark.parametrize(
    ("body", "mentioned"),
    [
        (b"[]", ""),
        (b"{", ""),
        (b"\xff", ""),
        (b"[" * 100_000, ""),
        (b'{"model": 5}', "model"),
        (b'{"unknown": 1}', "unknown"),
        (b'{"id": "a/b"}', "a/b"),
        (b'{"id": "' + b"x" * 201 + b'"}', ""),
        (b'{"id": ".."}', ".."),
        (b'{"roles": {"critic": {}}}', "critic"),
        (b'{"budgets": {"max_turns": 0}}', "max_turns"),
        (b'{"budgets": {"deadline": -1}}', "deadline"),
        (b'{"budgets": {"max_turns": 1000000000000000000000000}}', ""),
        (b'{"seed": 1000000000000000000000000}', ""),
        (b'{"sampling": {"max_tokens": 1000000000000000000000000}}', ""),
    ],
)
async def test_invalid_registration_is_rejected_and_registers_nothing(
    tmp_path: Path, body: bytes, mentioned: str
) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        answer = await gateway.request("POST", "/rollouts", body)
        assert answer.status == 400
        assert mentioned in answer.error["message"]
        assert (await gateway.request("GET", "/rollouts")).json == {"rollouts": []}


async def test_session_id_cannot_be_reused_after_the_session_ended(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        first = await gateway.register(id="x")
        for end in (None, "cancel", "delete"):
            if end == "cancel":
                await gateway.request("POST", "/rollouts/x/cancel")
            elif end == "delete":
                await gateway.request("DELETE", "/rollouts/x")
            answer = await gateway.request("POST", "/rollouts", {"id": "x"})
            assert (answer.status, answer.error["code"]) == (409, "conflict")
            assert first.secret.encode() not in answer.body
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        assert (await gateway.request("POST", "/rollouts", {"id": "x"})).status == 409


async def test_reading_a_trajectory_changes_nothing_and_ending_is_idempotent(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register(id="x")
        await gateway.chat(session)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        first = await gateway.trajectory(session)
        for _ in range(2):
            again = await gateway.trajectory(session)
            assert {**again, "now": 0} == {**first, "now": 0}
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
        assert first["turns"][0]["sampled"] == [ord("o"), ord("k"), 3]
        assert [part["mask"].count(1) for part in first["segments"]] == [3]
        binary = await gateway.request("GET", "/rollouts/x/trajectory", Accept="application/msgpack")
        assert binary.headers["content-type"] == "application/msgpack"
        for _ in range(2):
            assert (await gateway.request("POST", "/rollouts/x/cancel")).json["status"] == "cancelled"
        assert (await gateway.trajectory(session))["turns"] == first["turns"]
        for _ in range(2):
            assert (await gateway.request("DELETE", "/rollouts/x")).json == {"id": "x", "status": "deleted"}
        assert (await gateway.request("GET", "/rollouts/x/trajectory")).status == 410
        assert (await gateway.request("POST", "/rollouts/x/cancel")).status == 410


async def test_secret_appears_in_no_file_and_no_other_response(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register(id="x")
        await gateway.chat(session)
        for path in ("/rollouts", "/rollouts/x", "/rollouts/x/trajectory", "/metrics"):
            assert session.secret.encode() not in (await gateway.request("GET", path)).body
    assert all(session.secret.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause", {"mode": "nothing"}),
        ("/pause", {"timeout": 0}),
        ("/pause", {"timeout": 1e9}),
        ("/pause", {"deadline": 0}),
        ("/pause", {"deadline": b"1e999"}),
        ("/pause", {"more": 1}),
        ("/pause", b"nonsense"),
        ("/resume", {"version": "x"}),
        ("/resume", {"version": -1}),
        ("/resume", {"version": 10**30}),
        ("/resume", b"[" * 100_000),
    ],
)
async def test_invalid_pause_or_resume_is_rejected(tmp_path: Path, path: str, body: object) -> None:
    if isinstance(body, dict) and isinstance(body.get("deadline"), bytes):
        body = b'{"deadline": %b}' % body["deadline"]
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        answer = await gateway.request("POST", path, body)
        assert answer.status == 400
        assert answer.error["message"]
        assert (await gateway.request("GET", "/state")).json["paused"] is False


async def test_health_reports_a_delayed_event_loop(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        assert (await gateway.request("GET", "/healthz", key=None)).json == {"status": "ok"}
        gateway.shard._loop_delay = 3.0
        answer = await gateway.request("GET", "/healthz", key=None)
        assert answer.status == 503
        assert "3.0" in answer.json["status"]


async def test_closed_shard_leaves_no_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    upstream = ScriptedUpstream()
    async with run_shard(tmp_path, upstream) as gateway:
        await gateway.chat(await gateway.register())
    assert upstream.closed
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    "path",
    [
        "/v1beta/models/gemini-2.5-pro:generateContent",
        "/v1beta/models/m:streamGenerateContent",
        "/api/chat",
        "/v2/chat",
    ],
)
@pytest.mark.parametrize("key", ["right", "wrong", None])
async def test_unsupported_api_is_not_found_with_any_key(
    gateway: InProcessGateway, session: RegisteredSession, path: str, key: str | None
) -> None:
    secret = {"right": session.secret, "wrong": "no", None: None}[key]
    headers = {} if key else {"x_goog_api_key": session.secret}
    answer = await gateway.request("POST", session.path + path, {"contents": []}, key=secret, **headers)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "/chat/completions" in answer.error["message"]
    wrong = await gateway.request("POST", f"{session.path}/chat/completions", {}, key="no")
    assert wrong.status == 401
