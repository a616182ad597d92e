"""Rules of the network `allow`: what they cover, and which are refused."""

import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import SandboxSpec
from rookery.sandboxes import open_provider
from rookery.sandboxes.egress.rules import (
    Address,
    EgressRules,
    find_rule_problems,
    is_public,
    parse_host,
    parse_rule,
    proxy_environment,
)
from rookery.sandboxes.protocol import ProviderHome


def allows(text: str, host: str, port: int) -> bool:
    return EgressRules.parse([text]).allow(parse_host(host), port)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.org", "example.org", 80),
        ("example.org", "EXAMPLE.org.", 443),
        ("Example.ORG.", "example.org", 443),
        ("example.org:8443", "example.org", 8443),
        ("*.example.org", "a.example.org", 443),
        ("*.example.org", "a.b.example.org", 80),
        ("*.example.org:22", "a.example.org", 22),
        ("bücher.example", "xn--bcher-kva.example", 443),
        ("my_host.example", "my_host.example", 80),
        ("192.0.2.7", "192.0.2.7", 80),
        ("192.0.2.7:22", "192.0.2.7", 22),
        ("2001:db8::7", "2001:0db8:0::7", 443),
        ("[2001:db8::7]", "2001:db8::7", 443),
        ("[2001:db8::7]:22", "2001:db8::7", 22),
        ("192.0.2.7", "::ffff:192.0.2.7", 80),
        ("::ffff:192.0.2.7", "192.0.2.7", 80),
        ("localhost:8000", "localhost", 8000),
    ],
)
def test_rule_covers(text: str, host: str, port: int) -> None:
    assert allows(text, host, port)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.org", "example.org", 8443),
        ("example.org", "example.org", 22),
        ("example.org", "www.example.org", 443),
        ("example.org", "badexample.org", 443),
        ("example.org", "example.org.evil.test", 443),
        ("*.example.org", "example.org", 443),
        ("*.example.org", "badexample.org", 443),
        ("*.example.org", "example.org.evil.test", 443),
        ("example.org:8443", "example.org", 443),
        ("192.0.2.7", "192.0.2.8", 80),
        ("2001:db8::7", "2001:db8::8", 443),
        ("*.7", "192.0.2.7", 80),
    ],
)
def test_rule_does_not_cover(text: str, host: str, port: int) -> None:
    try:
        assert not allows(text, host, port)
    except ValueError:
        assert text == "*.7"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ""),
        ("  ", ""),
        ("exa mple.org", ""),
        ("example.org\n", ""),
        ("exam\u200bple.org", ""),
        ("http://example.org", ""),
        ("https://example.org/a", ""),
        ("example.org/a", ""),
        ("10.0.0.0/8", ""),
        ("*", "'all'"),
        ("*example.org", ""),
        ("a.*.example.org", ""),
        ("*.*.example.org", ""),
        ("example.*", ""),
        ("*.192.0.2.7", ""),
        ("example.org:0", "65535"),
        ("example.org:65536", ""),
        ("example.org:https", ""),
        ("example.org:", ""),
        ("example.org:-1", ""),
        ("example.org:٨٠", ""),
        ("[192.0.2.7]", ""),
        ("[2001:db8::7", ""),
        ("[2001:db8::7]22", ""),
        ("2001:db8::7::1", ""),
        ("fe80::1%eth0", "'%'"),
        ("user@example.org", ""),
        ("-a.example", ""),
        ("a..example", ""),
        (".example.org", ""),
        ("a" * 64 + ".example", ""),
        ("2130706433", ""),
        ("127.1", ""),
        ("0x7f.0.0.0x1", ""),
        ("0177.0.0.1", ""),
        ("256.1.1.1", ""),
    ],
)
def test_invalid_rule_is_refused_with_the_reason(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text)[:20])) as raised:
        parse_rule(text)
    assert named in str(raised.value)
    assert str(raised.value).partition(": ")[2]


@pytest.mark.parametrize("name", ["local", "subprocess"])
@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SandboxSpec(network="allow"), "'allow'"),
        (SandboxSpec(allow=("example.org",)), "'none'"),
        (SandboxSpec(network="model", allow=("example.org",)), "'model'"),
        (SandboxSpec(network="allow", allow=("example.org", "http://a")), "'http://a'"),
    ],
)
def test_providers_report_invalid_rules(name: str, spec: SandboxSpec, named: str, home: ProviderHome) -> None:
    assert named in " ".join(open_provider(name, home).check(spec))


def test_valid_spec_has_no_problem() -> None:
    assert find_rule_problems(SandboxSpec()) == []
    assert find_rule_problems(SandboxSpec(network="all")) == []
    assert find_rule_problems(SandboxSpec(network="allow", allow=("example.org", "*.example.org:22"))) == []


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
     "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
     "2002:7f00:1::", "2002:a00:1::1"],
)  # fmt: skip
def test_non_public_addresses(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    assert not EgressRules.parse(["example.org", "localhost"]).allow_address("example.org", address, 80)


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "93.184.216.34", "2606:2800:220:1::1", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_public_addresses(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


def test_non_public_address_needs_its_own_rule() -> None:
    own = ipaddress.ip_address("10.0.0.7")
    assert EgressRules.parse(["a.example", "10.0.0.7"]).allow_address("a.example", own, 443)
    assert not EgressRules.parse(["a.example:22", "10.0.0.7"]).allow_address("a.example", own, 22)
    assert EgressRules.parse(["localhost"]).allow_address("localhost", ipaddress.ip_address("127.0.0.1"), 80)
    assert not EgressRules.parse(["localhost"]).allow_address("localhost", own, 80)
    assert not EgressRules.parse(["a.localhost"]).allow_address(
        "a.localhost", ipaddress.ip_address("127.0.0.1"), 80
    )


def test_proxy_variables_exclude_the_sandboxs_loopback() -> None:
    variables = proxy_environment(EgressRules.parse(["example.org"]), "http://127.0.0.1:1")
    assert variables["HTTPS_PROXY"] == variables["http_proxy"] == variables["all_proxy"] == "http://127.0.0.1:1"
    assert variables["no_proxy"] == "localhost,127.0.0.1,::1"
    assert proxy_environment(EgressRules.parse(["localhost:1"]), "u")["NO_PROXY"] == "127.0.0.1,::1"


# --------------------------------------------------------------------------------------------------- properties

labels = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=4).map(".".join)
ports = st.integers(1, 65535)
addresses = st.ip_addresses()


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        made = parse_rule(text)
    except ValueError as error:
        assert str(error).partition(": ")[2]  # noqa: PT017
    else:
        assert all(0 < port < 65536 for port in made.ports)
        assert isinstance(made.host, Address) or (made.host.isascii() and made.host == made.host.lower())


@given(names, ports, names, ports)
def test_rule_covers_only_its_name_and_port(name: str, port: int, other: str, there: int) -> None:
    rules = EgressRules.parse([f"{name}:{port}"])
    assert rules.allow(name, port)
    assert rules.allow(other, there) == ((other, there) == (name, port))


@given(names, names)
def test_wildcard_covers_only_subdomains(name: str, other: str) -> None:
    rules = EgressRules.parse([f"*.{name}"])
    assert rules.allow(f"{other}.{name}", 443)
    assert not rules.allow(name, 443)
    assert rules.allow(other, 443) == other.endswith(f".{name}")


@given(addresses, addresses, ports)
def test_address_rule_covers_only_its_address(one: Address, other: Address, port: int) -> None:
    text = f"[{one}]:{port}" if one.version == 6 else f"{one}:{port}"
    rules = EgressRules.parse([text, "*.example.org", f"example.org:{port}"])
    assert rules.allow(parse_host(str(one)), port)
    assert rules.allow_address(parse_host(str(one)), one, port)
    assert rules.allow(parse_host(str(other)), port) == (parse_host(str(one)) == parse_host(str(other)))
