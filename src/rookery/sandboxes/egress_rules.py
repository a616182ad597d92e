"""Which hosts a sandbox may reach: the rules of `SandboxSpec.allow`. Pure.

    example.org             ports 80 and 443 of this name, and of no other
    example.org:8443        this port alone
    *.example.org           every name below it, not the name itself
    192.0.2.7, 2001:db8::7  an address; with a port: 192.0.2.7:22, [2001:db8::7]:22

Promises:
- a rule that could mean something else than it says is refused, with the rule and the reason;
- a name and an address are never taken for each other: who asks for an address needs a rule with that address;
- an address that is not a public one (private, loopback, link-local, multicast, of a cloud's metadata) is reached
  only where a rule names that very address, or, for loopback, the name `localhost`.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from rookery.core import SandboxSpec

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Host: TypeAlias = str | Address
"""A name, in lower case and ASCII, or an address; never an address in disguise."""

PORTS = (80, 443)
"""Of a rule without a port."""
OWN = ("localhost", "127.0.0.1", "::1")
"""What programs call their own machine: not asked of the proxy, unless a rule names it."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
# Besides what `ipaddress` calls private, of which each version of Python has a list of its own. The last is a
# cloud's metadata at an address that looks like anybody's.
_MORE_FOUR = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
_MORE_SIX = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
_PUBLIC_SIX = ipaddress.IPv6Network("2000::/3")
_WITH_FOUR = ipaddress.IPv6Network("64:ff9b::/96")


class Rule(NamedTuple):
    text: str
    host: Host
    below: bool
    """Whether it is for the names below the host instead of the host."""
    ports: tuple[int, ...]

    def covers(self, host: Host, port: int) -> bool:
        if port not in self.ports:
            return False
        if self.below:
            return isinstance(host, str) and host.endswith(f".{self.host}")
        return host == self.host


class Rules(tuple[Rule, ...]):
    """All of a sandbox's."""

    __slots__ = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Rules":
        """`ValueError` for one that is none."""
        return cls(rule(text) for text in texts)

    def allow(self, host: Host, port: int) -> bool:
        return any(rule.covers(host, port) for rule in self)

    def reach(self, host: Host, address: Address, port: int) -> bool:
        """Whether an allowed host may be reached at this address of it."""
        address = plain(address)
        if is_public(address) or (host == "localhost" and address.is_loopback):
            return True
        return any(rule.host == address and port in rule.ports for rule in self)

    def told(self) -> str:
        """For a program that asked for something else."""
        return ", ".join(rule.text for rule in self[:50]) + (", …" if len(self) > 50 else "")


def rule(text: str) -> Rule:
    def bad(why: str) -> ValueError:
        return ValueError(f"{text!r:.120} is no host that can be allowed: {why}")

    if not text or not text.strip():
        raise bad("it is empty")
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        raise bad("it contains a space or an invisible letter")
    if "://" in text:
        raise bad("it is a URL; write the host alone, for example example.org or example.org:443")
    if "/" in text:
        raise bad("there are no paths and no ranges of addresses; write the host alone")
    below = text.startswith("*.")
    rest = text[2:] if below else text
    if "*" in rest:
        why = "for everything there is the network 'all'" if text == "*" else "'*' may only stand first, as in"
        raise bad(why if text == "*" else f"{why} *.example.org")
    try:
        name, port = split(rest, bare_six=True)
        host = host_of(name)
    except ValueError as error:
        raise bad(str(error)) from None
    if below and not isinstance(host, str):
        raise bad("there is nothing below an address")
    return Rule(text, host, below, PORTS if port is None else (port,))


def split(text: str, *, bare_six: bool = False) -> tuple[str, int | None]:
    """`host`, `host:port`, `[address]`, `[address]:port`; a bare address with colons where it may be."""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in name or (rest and not rest.startswith(":")):
            raise ValueError("its brackets hold no address")
        port, given = rest[1:], bool(rest)
    elif text.count(":") > 1:
        if not bare_six:
            raise ValueError("an address with colons needs brackets: [2001:db8::7]:443")
        return text, None
    else:
        name, colon, port = text.partition(":")
        given = bool(colon)
    if not given:
        return name, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ValueError(f"{port!r:.20} is no port; ports are 1 to 65535")
    return name, int(port)


def host_of(text: str) -> Host:
    """A name or an address, in its one form; `ValueError` where it is neither."""
    if "%" in text:
        raise ValueError("a '%' is part of no host")
    try:
        return plain(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not text.isascii():
        try:
            text = text.encode("idna").decode("ascii")
        except UnicodeError:
            raise ValueError("its name cannot be written in ASCII") from None
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("it is neither a name nor an address")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers take 2130706433, 127.1 and 0x7f.1 for 127.0.0.1.
        raise ValueError("it is a number, and no address")
    return name


def plain(address: Address) -> Address:
    """The address of four that one of six only wraps."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def is_public(address: Address) -> bool:
    address = plain(address)
    if isinstance(address, ipaddress.IPv6Address):
        # Gateways hand these on to the address inside.
        inside = address.sixtofour
        if address in _WITH_FOUR:
            inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inside is not None:
            return is_public(inside)
        if address not in _PUBLIC_SIX or any(address in network for network in _MORE_SIX):
            return False
    elif any(address in network for network in _MORE_FOUR):
        return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified or address.is_private
    )


def problems(spec: SandboxSpec) -> list[str]:
    """What is wrong with a spec's rules, whoever makes the sandbox, in sentences."""
    if spec.network != "allow" and spec.allow:
        return [
            f"Hosts to allow ({', '.join(spec.allow):.80}) go with the network 'allow', not with {spec.network!r}."
        ]
    if spec.network == "allow" and not spec.allow:
        return ["The network 'allow' needs hosts to allow: name at least one."]
    said = []
    for text in spec.allow:
        try:
            rule(text)
        except ValueError as error:
            said.append(f"{error}.")
    return said


def environment(rules: Rules, url: str) -> dict[str, str]:
    """The variables that make programs use the proxy."""
    named = {str(rule.host) for rule in rules}
    # Not socks5h:// for the rest: Python's HTTP clients fail to start on it without a package of its own.
    said = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), url)
    said["NO_PROXY"] = ",".join(name for name in OWN if name not in named)
    return {**said, **{name.lower(): value for name, value in said.items()}}
