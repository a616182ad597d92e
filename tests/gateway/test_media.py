"""URLs in messages that the session's network does not allow never reach the engine."""

from typing import Any

import msgspec
import pytest

from rookery.core.sandboxes import Network
from rookery.gateway.media import refusal
from tests.gateway.kit import InProcessGateway
from tests.gateway.scripted_upstream import ScriptedUpstream

DATA = "data:image/png;base64,AAAA"
PUBLIC = "https://images.example.org/a.png"
NEVER = [
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    " file:///etc/passwd",
    "/etc/passwd",
    "~/.ssh/id_rsa",
    "ftp://example.org/a.png",
    "gopher://example.org",
    "http://127.0.0.1:8000/a.png",
    "http://127.1/a.png",
    "http://2130706433/",
    "http://0x7f.0.0.1/",
    "http://0/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]:80/",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://a.localhost/",
    "http://169.254.169.254/latest/meta-data",
    "http://metadata.google.internal/",
    "http://10.0.0.1/",
    "http://192.168.1.1/",
    "http://[fd00::1]/",
    "http://example.org@127.0.0.1/",
    "http://example.org\\@127.0.0.1/",
    "http://127.0.0.1\t/",
    "http://engine:8000/",
    "http:///a.png",
    "http://example.org:99999/",
    "image.png",
    "",
]


@pytest.mark.parametrize("network", ["none", "model", "allow", "all"])
@pytest.mark.parametrize("url", NEVER)
def test_local_files_and_private_addresses_are_rejected_in_every_network(url: str, network: Network) -> None:
    assert refusal(url, network, ("127.0.0.1", "localhost") if network == "allow" else ())


@pytest.mark.parametrize(
    ("url", "network", "allow", "passes"),
    [
        *((DATA, network, (), True) for network in ("none", "model", "allow", "all")),
        (PUBLIC, "all", (), True),
        (PUBLIC, "none", (), False),
        (PUBLIC, "model", (), False),
        (PUBLIC, "allow", (), False),
        (PUBLIC, "allow", ("images.example.org",), True),
        (PUBLIC, "allow", ("*.example.org",), True),
        (PUBLIC, "allow", ("example.org",), False),
        (PUBLIC, "allow", ("images.example.org:8443",), False),
        ("https://1.1.1.1/a.png", "all", (), True),
    ],
)
def test_url_is_allowed_only_if_the_network_reaches_it(
    url: str, network: Network, allow: tuple[str, ...], passes: bool
) -> None:
    assert (not refusal(url, network, allow)) == passes


CHAT = "/chat/completions"
BODIES: list[tuple[str, Any]] = [
    (
        CHAT,
        lambda url: {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        },
    ),
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}),
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [{"image_url": url}]}]}),
    (
        CHAT,
        lambda url: {
            "messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]
        },
    ),
    (
        CHAT,
        lambda url: {
            "messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": url}}]}]
        },
    ),
    (
        CHAT,
        lambda url: {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}],
                },
            ]
        },
    ),
    (
        "/messages",
        lambda url: {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
    ),
    (
        "/responses",
        lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    ),
    (
        "/responses",
        lambda url: {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]},
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_dialect_rejects_urls_that_the_network_does_not_allow(
    gateway: InProcessGateway, upstream: ScriptedUpstream, path: str, body: Any
) -> None:
    for network, url, passes in (
        ("model", "file:///etc/passwd", False),
        ("model", PUBLIC, False),
        ("model", DATA, True),
        ("all", PUBLIC, True),
        ("all", "http://127.0.0.1:8000/", False),
    ):
        before = len(upstream.calls)
        session = await gateway.register(network=network)
        answer = await gateway.request("POST", session.path + path, body(url), key=session.secret)
        assert answer.status == (200 if passes else 400), answer.body
        assert len(upstream.calls) == before + passes
        if passes:
            forwarded = b"".join(msgspec.json.encode(one) for one in upstream.calls[-1].request.messages)
            assert url.encode() in forwarded


async def test_urls_inside_text_are_not_checked(gateway: InProcessGateway) -> None:
    session = await gateway.register(network="none")
    content = [{"type": "text", "text": "file:///etc/passwd"}]
    assert (await gateway.chat(session, [{"role": "user", "content": content}])).status == 200
    assert (await gateway.chat(session, "see http://127.0.0.1/")).status == 200


@pytest.mark.parametrize(
    "wrong", [{"network": "some"}, {"allow": ["a.org"]}, {"network": "allow", "allow": ["*"]}]
)
async def test_invalid_network_is_rejected_at_registration(gateway: InProcessGateway, wrong: Any) -> None:
    assert (await gateway.request("POST", "/rollouts", wrong)).status == 400
