"""Decide which media URLs in messages (images, audio, video) are passed to the inference engine. Runs in gateway
shards.

The inference engine fetches such URLs from its own machine. Without a check, an agent whose sandbox has no network
could read files and internal services of that machine. A session's network is that of its sandbox, or `all` if its
registration names none:

| network | URLs in messages |
|---|---|
| `none`, `model` | only `data:` URLs |
| `allow` | `data:`, and http(s) URLs of public hosts in the session's list `allow` |
| `all` | `data:`, and http(s) URLs of public hosts |

Other schemes, local paths, loopback and private addresses are refused in every network. A public name that
resolves or redirects to a private address is not noticed here; the inference engine has to refuse it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from rookery.core import Message
from rookery.core.sandboxes import Network
from rookery.gateway.dialects.protocol import BadRequestError
from rookery.sandboxes.egress.rules import EgressRules, is_public, parse_host

_SCHEME: Final = re.compile(r"\s*[a-zA-Z][a-zA-Z0-9+.-]*:(?=//|/|\S)")
_STRANGE: Final = re.compile(r"[\s\x00-\x1f\x7f\\]")
_LOCAL: Final = ("localhost", "local", "internal", "localdomain", "home", "lan", "intranet", "corp", "arpa")
"""Top-level labels of host names that are not public."""
_TEXTS: Final = frozenset({"text", "refusal", "type", "detail", "format", "cache_control", "id", "uuid", "name"})
"""Keys of a content part whose values are not URLs."""
_MEDIA: Final = frozenset({"url", "uri", "path", "file", "image", "audio", "video"})
MAX_DEPTH: Final = 16


def check_media(messages: Iterable[Message], network: Network, allow: tuple[str, ...]) -> None:
    """Raise `BadRequestError` if a message contains a media URL that the session's network does not allow."""
    for message in messages:
        if not isinstance(message.content, tuple):
            continue
        for part in message.content:
            for url in _urls(part):
                if why := refusal(url, network, allow):
                    raise BadRequestError(f"the URL {url[:100]!r} in a message is refused: {why}", "messages")


def _urls(value: Any, key: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the strings in a content part that an inference engine may use as a URL or path."""
    if depth > MAX_DEPTH:
        raise BadRequestError("a content part of a message is nested too deeply", "messages")
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in _TEXTS:
                yield from _urls(inner, str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _urls(inner, key, depth + 1)
    elif isinstance(value, str):
        named = key in _MEDIA or key.endswith(("_url", "_uri", "_path", "_file"))
        if named or _SCHEME.match(value) or value.lstrip().startswith(("/", "~", "\\")):
            yield value


def refusal(url: str, network: Network, allow: tuple[str, ...]) -> str:
    """Return why a URL may not be passed to the inference engine; empty if it may."""
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return ""
    if scheme not in ("http", "https") or _STRANGE.search(url):
        return "only data:, http: and https: URLs are allowed; send the content as a data: URL"
    if network in ("none", "model"):
        return "the session's network reaches no hosts; send the content as a data: URL"
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if scheme == "https" else 80)
        host = parse_host(parts.hostname or "")
    except ValueError as error:
        return f"its host is invalid ({error})"
    if isinstance(host, str):
        if "." not in host or host.rpartition(".")[2] in _LOCAL:
            return "its host name is not public"
    elif not is_public(host):
        return "its IP address is not public"
    if network == "allow" and not EgressRules.parse(allow).allow(host, port):
        return f"the session's network allows only {EgressRules.parse(allow).describe() or 'no host'}"
    return ""
