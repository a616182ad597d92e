"""HTTP exchanges over TLS: certificates, host names, and connections that end early."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from rookery.upstreams.http_client import Client, ConnectError, ConnectionDropped, IncompleteResponse
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, chunked, fetch, run, spin, until, whole

BODY = bytes(range(256)) * 2000

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="[probed] there is no openssl here")

_OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=engine.test "
    "-addext subjectAltName=IP:127.0.0.1,DNS:engine.test"
)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [*_OPENSSL.split(), "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return key, cert


@pytest.fixture(scope="session")
def server_side(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    return context


@pytest.fixture(scope="session")
def trusting(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[1]))


@both_loops
def test_exchanges_over_tls_keep_their_connection(
    loop: str, server_side: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async def main() -> None:
        raw = chunked([BODY[i : i + 5000] for i in range(0, len(BODY), 5000)])
        for answer in (whole(BODY), raw):
            async with (
                Script(answering(answer), ssl=server_side) as server,
                server.client(ssl=trusting, buffer=1000) as client,
            ):
                for streamed in (False, True, False):
                    assert await fetch(client, streamed=streamed) == BODY
                assert server.connections == 1
                await asyncio.gather(*(fetch(client) for _ in range(10)))
                await until(lambda client=client: client.live == client.idle)

    run(main(), loop)


@both_loops
def test_name_is_checked_and_sent_to_the_server(
    loop: str, server_side: ssl.SSLContext, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str | None] = []
    server_side.sni_callback = lambda _sock, name, _context: names.append(name)
    where: list[int] = []
    monkeypatch.setattr(
        "rookery.upstreams.http_client.dial._resolve", lambda *_: [(2, 6, ("127.0.0.1", where[0]))], raising=True
    )

    async def main() -> None:
        async with Script(answering(whole(b"ok")), ssl=server_side) as server:
            where[:] = [server.port]
            async with Client("engine.test", server.port, ssl=trusting) as client:
                assert await fetch(client) == b"ok"
            async with Client("other.test", server.port, ssl=trusting) as client:
                with pytest.raises(ConnectError, match=r"other\.test") as caught:
                    await fetch(client)
                assert caught.value.reason == "tls"
        assert names == ["engine.test", "other.test"]

    run(main(), loop)


@both_loops
def test_untrusted_server_receives_no_request(loop: str, server_side: ssl.SSLContext) -> None:
    async def main() -> None:
        requests: list[bytes] = []

        async def handle(wire: Wire) -> None:
            requests.append(await wire.request())

        async with Script(handle, ssl=server_side) as server, server.client(ssl=True) as client:
            with pytest.raises(ConnectError, match=r"self.signed") as caught:
                await fetch(client)
            assert caught.value.reason == "tls"
            assert client.live == 0
        assert not any(requests)

    run(main(), loop)


@both_loops
def test_tls_mismatch_between_client_and_server_is_reported(
    loop: str, server_side: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async def main() -> None:
        async def plain(wire: Wire) -> None:
            await wire.reader.read(100)
            await wire.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        async with Script(plain, tcp=True) as server, server.client(ssl=trusting) as client:
            with pytest.raises(ConnectError) as caught:
                await fetch(client)
            assert caught.value.reason == "tls"
        async with Script(answering(whole(b"ok")), ssl=server_side) as server, server.client() as client:
            with pytest.raises((IncompleteResponse, ConnectionDropped)):
                await fetch(client)

    run(main(), loop)


@both_loops
def test_failed_or_hanging_handshake_is_a_connect_error(loop: str, trusting: ssl.SSLContext) -> None:
    async def main() -> None:
        async def ends(wire: Wire) -> None:
            await wire.reader.read(1)

        async def hangs(wire: Wire) -> None:
            await wire.wait_until_closed()

        async with Script(ends, tcp=True) as server, server.client(ssl=trusting) as client:
            with pytest.raises(ConnectError) as caught:
                await fetch(client)
            assert caught.value.reason == "network"
        async with Script(hangs, tcp=True) as server, server.client(ssl=trusting, connect=0.1) as client:
            with pytest.raises(ConnectError) as caught:
                await fetch(client)
            assert caught.value.reason == "timeout"
            await until(lambda: server.open == 0)
        async with Script(hangs, tcp=True) as server, server.client(ssl=trusting) as client:
            task = asyncio.create_task(fetch(client))
            await until(lambda: server.open == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: server.open == 0)

    run(main(), loop)


@both_loops
def test_cancelling_after_any_number_of_loop_iterations_leaves_nothing(
    loop: str, server_side: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async def main() -> None:
        async with (
            Script(answering(whole(b"ok")), ssl=server_side) as server,
            server.client(ssl=trusting, idle=0) as client,
        ):
            finished = number = 0
            while finished < 2:
                task = asyncio.create_task(fetch(client))
                await spin(number)
                number += 1
                task.cancel()
                try:
                    assert await task == b"ok"
                    finished += 1
                except asyncio.CancelledError:
                    pass
                await until(lambda: client.live == server.open == 0)
            assert number > 5

    run(main(), loop)


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("kind", ["length", "chunks"])
def test_response_cut_over_tls_is_never_complete(
    kind: str, loop: str, server_side: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    raw = whole(b"body") if kind == "length" else chunked([b"bo", b"dy"])

    async def main() -> None:
        cuts = iter(range(len(raw)))

        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(raw[: next(cuts)])

        async with Script(handle, ssl=server_side) as server, server.client(ssl=trusting) as client:
            for at in range(len(raw)):
                with pytest.raises(IncompleteResponse if at else ConnectionDropped):
                    await fetch(client, streamed=bool(at % 2))
            await until(lambda: client.live == 0)

    run(main(), loop)
