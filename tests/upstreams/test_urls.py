"""Base URLs: every spelling of one, and the parts that are never shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import UsageError
from rookery.upstreams.urls import Address, redact


@pytest.mark.parametrize(
    "text",
    [
        "http://h:8000",
        "http://h:8000/",
        "http://h:8000/v1",
        "http://h:8000/v1/",
        "http://h:8000/v1/chat/completions",
        "http://h:8000/v1/completions",
        "http://user:pass@h:8000",
    ],
)
def test_server_is_the_same_with_or_without_v1(text):
    address = Address(text)
    assert str(address.endpoint("chat/completions")) == "http://h:8000/v1/chat/completions"
    assert address.shown == "http://h:8000/v1"


@pytest.mark.parametrize("path", ["/v1/rollouts/x", "/openai", "/api/v3", "/a/v1"])
def test_any_other_path_is_kept(path):
    assert str(Address(f"https://h{path}/").endpoint("models")) == f"https://h{path}/models"


def test_query_goes_with_every_call_and_is_never_shown():
    address = Address("https://h/openai?api-version=3&key=sesame")
    assert str(address.endpoint("models")) == "https://h/openai/models?api-version=3&key=sesame"
    assert "sesame" not in address.shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:8000",
        "127.0.0.1",
        "ftp://h/v1",
        "http://",
        "http:///v1",
        "http://h:port",
        "http://h:99999",
        "http://h:0",
        "http:h",
        "http://h h",
        "http://[::1",
        "http://h\n",
        "unix:///tmp/x",
    ],
)
def test_invalid_url_is_refused(text):
    with pytest.raises(UsageError, match="URL"):
        Address(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:sesame@h:1/v1",
        "http://sesame@h",
        "http://me:ses@me@h",
        "http://me:sesame/x@h/v1",
        "https://h/v1?key=sesame",
        "https://h/v1#sesame",
        "me:sesame@h",
    ],
)
def test_shown_url_contains_no_secret(text):
    assert "ses" not in redact(text)
    try:
        shown = Address(text).shown
    except UsageError as error:
        shown = str(error)
    assert "ses" not in shown


def test_redacting_keeps_the_rest():
    assert redact("http://a:b@h:1/v1/x@y") == "http://h:1/v1/x@y"
    assert redact("h:1/x") == "h:1/x"


@given(st.text())
def test_any_text_is_an_address_or_a_usage_error(text):
    redact(text)
    for value in (text, f"http://{text}", f"http://h/{text}"):
        try:
            Address(value).endpoint("models")
        except UsageError:
            continue


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://h:1", "http://h:1/pause?mode=keep"),
        ("http://h:1/v1/", "http://h:1/pause?mode=keep"),
        ("http://h:1/engine/v1", "http://h:1/engine/pause?mode=keep"),
        ("http://h:1/engine", "http://h:1/engine/pause?mode=keep"),
        ("http://h:1/v1?key=x", "http://h:1/pause?key=x&mode=keep"),
        ("http://h:1/inference/v1/generate", "http://h:1/pause?mode=keep"),
        ("http://h:1/generate", "http://h:1/pause?mode=keep"),
    ],
)
def test_engines_own_endpoints_are_beside_v1(url, own):
    assert str(Address(url).endpoint("/pause?mode=keep")) == own
