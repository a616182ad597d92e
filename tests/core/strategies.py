"""Hypothesis strategies for every struct of `rookery.core`, derived from the annotations of its fields."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from rookery.core import Extra, Limits, Message, SandboxSpec, Segment, Span, Turn, floats, ints

finite = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-(2**63), 2**63 - 1)
names = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | integers | finite | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a struct class or for any type that its fields use."""
    return _custom[kind] if kind in _custom else _strategy_for(mi.type_info(kind))


def _strategy_for(kind: mi.Type) -> st.SearchStrategy[Any]:
    match kind:
        case mi.AnyType():
            return json_values
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            return integers
        case mi.FloatType():
            return finite
        case mi.StrType():
            return names
        case mi.BytesType():
            return st.binary(max_size=8)
        case mi.LiteralType(values):
            return st.sampled_from(values)
        case mi.UnionType(types):
            return st.one_of([_strategy_for(each) for each in types])
        case mi.ListType(item_type=item):
            return st.lists(_strategy_for(item), max_size=3)
        case mi.VarTupleType(item_type=item):
            return st.lists(_strategy_for(item), max_size=3).map(tuple)
        case mi.DictType(key_type=key, value_type=value):
            return st.dictionaries(_strategy_for(key), _strategy_for(value), max_size=3)
        case mi.StructType(cls=cls):
            return (
                _custom[cls]
                if cls in _custom
                else st.builds(cls, **{f.name: _strategy_for(f.type) for f in kind.fields})
            )
    raise AssertionError(f"no strategy for {kind}")


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    counts = {name: draw(st.none() | st.integers(1, 2**40)) for name in ("turns", "tokens", "context")}
    seconds = draw(
        st.dictionaries(
            st.sampled_from(["queue", "setup", "run", "score", "teardown", "call", "model_call"]),
            st.floats(min_value=1e-9, max_value=1e9),
        )
    )
    return Limits(**counts, **seconds)


@st.composite
def sandbox_specs(draw: st.DrawFn) -> SandboxSpec:
    counts, numbers = st.integers(1, 2**63 - 1), st.floats(min_value=1e-9, max_value=1e9)
    limits = {
        **dict.fromkeys(("memory", "pids", "disk"), st.none() | counts),
        **dict.fromkeys(("cpus", "cpu_seconds"), st.none() | numbers),
        "wall": numbers,
        "output": counts,
    }
    fields = {each.encode_name: each.type for each in mi.type_info(SandboxSpec).fields}
    return SandboxSpec(
        **{name: draw(limits[name] if name in limits else _strategy_for(kind)) for name, kind in fields.items()}
    )


tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)
logprob = st.floats(max_value=0.0, min_value=-1e6, width=32)


@st.composite
def extras(draw: st.DrawFn, n: int) -> dict[str, Extra]:
    widths = draw(st.dictionaries(names, st.integers(0, 4), max_size=2))
    return {name: Extra("uint8", width, bytes(width * n)) for name, width in widths.items()}


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(tokens)
    logprobs = draw(st.just([]) | st.lists(logprob, min_size=len(sampled), max_size=len(sampled)))
    return Turn(
        attempt=draw(names),
        index=draw(st.integers(0, 99)),
        response=draw(values_of(Message)),
        role=draw(names),
        parent=draw(st.none() | st.integers(0, 9)),
        messages=draw(st.lists(values_of(Message), max_size=2).map(tuple)),
        prefix=draw(st.integers(0, 99)),
        prompt=ints(draw(tokens)),
        sampled=ints(sampled),
        logprobs=floats(logprobs),
        version=draw(integers),
        seconds=draw(finite),
        extras=draw(extras(len(sampled))),
    )


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    mask = bytes(draw(st.lists(st.booleans(), max_size=12)))
    n = len(mask)
    return Segment(
        tokens=ints(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))),
        mask=mask,
        logprobs=floats(draw(st.lists(logprob, min_size=n, max_size=n))),
        versions=tuple(Span(at, at + 1, draw(integers)) for at, on in enumerate(mask) if on),
        extras=draw(extras(n)),
        turns=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
    )


_custom: dict[Any, st.SearchStrategy[Any]] = {
    Limits: limits(),
    SandboxSpec: sandbox_specs(),
    Segment: segments(),
    Turn: turns(),
}


def structs(module: Any) -> list[type[msgspec.Struct]]:
    """List the structs that a module exports."""
    return [
        value
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, msgspec.Struct)
    ]
