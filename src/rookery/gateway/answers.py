"""Answers of a gateway, as its own processes read them."""

import msgspec


def wrong_in(answer: bytes) -> str:
    """What an answer says is wrong; its beginning, where it is none of a gateway's."""
    try:
        return str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return answer[:200].decode("utf-8", "replace")
