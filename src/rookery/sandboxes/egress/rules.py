"""Rules of the network `allow`, which say which hosts a sandbox may reach. No I/O.

    example.org             ports 80 and 443 of this name only
    example.org:8443        this port only
    *.example.org           every name below it, but not the name itself
    192.0.2.7, 2001:db8::7  an address; with a port: 192.0.2.7:22, [2001:db8::7]:22

Guarantees:
- an ambiguous rule is refused with a message that contains the rule and the reason;
- names and addresses are distinct: a request for an address needs a rule with that address;
- an address that is not public (private, loopback, link-local, multicast, cloud metadata) is reached only if a
  rule names that address or, for loopback, the name `localhost`.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from rookery.core import SandboxSpec

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Host: TypeAlias = str | Address
"""A host name in lower-case ASCII, or an IP address. Other numbers that resolvers accept as addresses, such as
2130706433 for 127.0.0.1, are refused."""

DEFAULT_PORTS = (80, 443)
"""Ports that a rule without a port allows."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names of the sandbox's own loopback interface. Programs reach it without the proxy, unless a rule names it."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
# In addition to what `ipaddress` calls private, which differs between versions of Python. The last network is the
# metadata service of a cloud, which has an ordinary public address.
_NON_PUBLIC_IPV4 = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
_NON_PUBLIC_IPV6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class EgressRule(NamedTuple):
    text: str
    host: Host
    is_wildcard: bool
    """True if the rule covers all names below `host` (`*.host`) instead of `host` itself."""
    ports: tuple[int, ...]

    def covers(self, host: Host, port: int) -> bool:
        if port not in self.ports:
            return False
        if self.is_wildcard:
            return isinstance(host, str) and host.endswith(f".{self.host}")
        return host == self.host


class EgressRules(tuple[EgressRule, ...]):
    """The rules of one sandbox. A connection is allowed if any rule allows it."""

    __slots__ = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "EgressRules":
        """Parse the texts of rules. Raise `ValueError` for an invalid one."""
        return cls(parse_rule(text) for text in texts)

    def allow(self, host: Host, port: int) -> bool:
        return any(rule.covers(host, port) for rule in self)

    def allow_address(self, host: Host, address: Address, port: int) -> bool:
        """Return whether a host that the rules allow may be reached at this address.

        An address that is not public needs a rule of its own, except a loopback address of `localhost`.
        """
        address = unwrap_ipv4_mapped(address)
        if is_public(address) or (host == "localhost" and address.is_loopback):
            return True
        return any(rule.host == address and port in rule.ports for rule in self)

    def describe(self) -> str:
        """Return the first 50 rules as text, for the message to a program whose request was refused."""
        return ", ".join(rule.text for rule in self[:50]) + (", …" if len(self) > 50 else "")


def parse_rule(text: str) -> EgressRule:
    def invalid(why: str) -> ValueError:
        return ValueError(f"{text!r:.120} is not a valid rule: {why}")

    if not text or not text.strip():
        raise invalid("it is empty")
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        raise invalid("it contains a space or an unprintable character")
    if "://" in text:
        raise invalid("it is a URL; write the host alone, for example example.org or example.org:443")
    if "/" in text:
        raise invalid("paths and address ranges are not supported; write the host alone")
    is_wildcard = text.startswith("*.")
    rest = text[2:] if is_wildcard else text
    if "*" in rest:
        why = (
            "use the network 'all' to allow every host"
            if text == "*"
            else "'*' is only allowed at the beginning, as in"
        )
        raise invalid(why if text == "*" else f"{why} *.example.org")
    try:
        name, port = split(rest, bare_ipv6=True)
        host = parse_host(name)
    except ValueError as error:
        raise invalid(str(error)) from None
    if is_wildcard and not isinstance(host, str):
        raise invalid("a wildcard needs a name, not an address")
    return EgressRule(text, host, is_wildcard, DEFAULT_PORTS if port is None else (port,))


def split(text: str, *, bare_ipv6: bool = False) -> tuple[str, int | None]:
    """Split a text into host and port; the port is None if the text has none.

    The text is `host`, `host:port`, `[address]` or `[address]:port`, with `bare_ipv6` also an IPv6 address without
    brackets. Raise `ValueError` for anything else.
    """
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in name or (rest and not rest.startswith(":")):
            raise ValueError("the brackets do not contain an IPv6 address")
        port, has_port = rest[1:], bool(rest)
    elif text.count(":") > 1:
        if not bare_ipv6:
            raise ValueError("an IPv6 address needs brackets: [2001:db8::7]:443")
        return text, None
    else:
        name, colon, port = text.partition(":")
        has_port = bool(colon)
    if not has_port:
        return name, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{port!r:.20} is not a port; ports are 1 to 65535")
    return name, int(port)


def parse_host(text: str) -> Host:
    """Return a host name or an IP address in canonical form; raise `ValueError` if the text is neither."""
    if "%" in text:
        raise ValueError("'%' is not allowed in a host")
    try:
        return unwrap_ipv4_mapped(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not text.isascii():
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError:
            raise ValueError("the host name cannot be written in ASCII") from None
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r:.80} is neither a host name nor an IP address")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers accept 2130706433, 127.1 and 0x7f.1 for 127.0.0.1.
        raise ValueError(
            f"{text!r:.80} is a number but not an IP address: write four parts from 0 to 255, or a host name"
        )
    return name


def unwrap_ipv4_mapped(address: Address) -> Address:
    """Return the IPv4 address of an IPv4-mapped IPv6 address; return any other address unchanged."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_public(address: Address) -> bool:
    address = unwrap_ipv4_mapped(address)
    if isinstance(address, ipaddress.IPv6Address):
        # Gateways forward 6to4 and NAT64 addresses to the embedded IPv4 address.
        inside = address.sixtofour
        if address in _NAT64:
            inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inside is not None:
            return is_public(inside)
        if address not in _PUBLIC_IPV6 or any(address in network for network in _NON_PUBLIC_IPV6):
            return False
    elif any(address in network for network in _NON_PUBLIC_IPV4):
        return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified or address.is_private
    )


def find_rule_problems(spec: SandboxSpec) -> list[str]:
    """Return one sentence for each problem of a spec's egress rules (`allow`), whatever the provider."""
    if spec.network != "allow" and spec.allow:
        return [f"Allowed hosts ({', '.join(spec.allow):.80}) require the network 'allow', not {spec.network!r}."]
    if spec.network == "allow" and not spec.allow:
        return ["The network 'allow' needs at least one allowed host."]
    variables = []
    for text in spec.allow:
        try:
            parse_rule(text)
        except ValueError as error:
            variables.append(f"{error}.")
    return variables


def proxy_environment(rules: EgressRules, url: str) -> dict[str, str]:
    """Return the environment variables that make programs use the proxy at `url`."""
    named = {str(rule.host) for rule in rules}
    # Not socks5h:// for ALL_PROXY: Python's HTTP clients fail to start with it without an extra package.
    variables = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), url)
    variables["NO_PROXY"] = ",".join(name for name in LOCAL_NAMES if name not in named)
    return {**variables, **{name.lower(): value for name, value in variables.items()}}
