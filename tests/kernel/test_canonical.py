"""Canonical JSON: equal values have equal bytes, those of RFC 8785."""

from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel import canonical
from penstock.kernel.errors import Invalid

INTS = st.integers(-(2**53) + 1, 2**53 - 1)
AROUND_SURROGATES = st.text(st.characters(min_codepoint=0xD700, max_codepoint=0x103FF, exclude_categories=["Cs"]))
CONTROLS = st.text(st.characters(max_codepoint=0xA0))
TEXTS = st.text() | AROUND_SURROGATES | CONTROLS
PAYLOADS = st.recursive(
    st.none() | st.booleans() | INTS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=20,
)


@settings(deadline=None)
@given(PAYLOADS)
def test_the_bytes_are_those_of_rfc_8785(payload: Any) -> None:
    """I8: for every payload the bytes are those of another implementation of RFC 8785."""
    assert canonical.dumps(payload) == rfc8785.dumps(payload)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, INTS, min_size=2), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(payload: dict[str, int], random: Any) -> None:
    """I8: equal dictionaries have equal digests, whatever the order of their keys."""
    keys = list(payload)
    random.shuffle(keys)
    assert canonical.compute_digest({key: payload[key] for key in keys}) == canonical.compute_digest(payload)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"b": 1, "a": None}, '{"a":null,"b":1}'),
        ({"é": True, "z": [], "": {}}, '{"":{},"z":[],"é":true}'),
        ({"\U0001f600": 1, "\ue000": 2, "\uffff": 3}, '{"\U0001f600":1,"\ue000":2,"\uffff":3}'),
        ([{"\U0001f600": {"b": 1, "a": (1, 2)}}], '[{"\U0001f600":{"a":[1,2],"b":1}}]'),
        ('\0\t\x1f\x7f\u2028/\\"', '"\\u0000\\t\\u001f\x7f\u2028/\\\\\\""'),
        (2**53 - 1, "9007199254740991"),
    ],
)
def test_known_texts(payload: Any, text: str) -> None:
    """I8: keys are sorted as UTF-16, there are no spaces, and only control characters are escaped."""
    assert canonical.dumps(payload).decode() == text


@pytest.mark.parametrize(
    ("payload", "digest"),
    [
        ({}, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        (
            {"sku": "A-1", "price_minor": 1999, "note": None},
            "4be94bafba5d59b9f6e55badd36a8005723cb5a6ca2fc0da4c8e67fd468fe375",
        ),
        ({"\U0001f600": 1, "\ue000": 2}, "04208f6cdb854e2ab1b07dd3633a39dec854344fe72824cf7f2fdb4e2e33129e"),
    ],
)
def test_digests_never_change(payload: Any, digest: str) -> None:
    """I8: a row has the same id in every release."""
    assert canonical.compute_digest(payload) == digest


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(1.0, id="float"),
        pytest.param({"a": [float("nan")]}, id="nan"),
        pytest.param(2**53, id="int too large"),
        pytest.param([-(2**53)], id="int too small"),
        pytest.param(10**5000, id="int too long to print"),
        pytest.param({1: 2}, id="int as key"),
        pytest.param({10**5000: 2}, id="int too long to print as key"),
        pytest.param({None: 2, "a": 1}, id="none as key"),
        pytest.param({(1, 2): 2}, id="tuple as key"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param({"\udfff": 1}, id="lone surrogate as key"),
        pytest.param({"\U0001f600": "\ud800"}, id="lone surrogate beside an astral key"),
        pytest.param({"\U0001f600\ud800": 1}, id="lone surrogate in an astral key"),
        pytest.param(b"bytes", id="bytes"),
        pytest.param({1, 2}, id="set"),
        pytest.param(object(), id="object"),
        pytest.param(_nested(200), id="too deep"),
        pytest.param(_nested(100_000), id="much too deep"),
        pytest.param(_endless(), id="endless"),
    ],
)
def test_a_value_without_a_canonical_form_is_refused(payload: Any) -> None:
    """I8: floats, inexact integers and other types are Invalid NOT_CANONICAL, never a crash."""
    with pytest.raises(Invalid) as refused:
        canonical.dumps(payload)
    assert refused.value.code == "NOT_CANONICAL"


def test_a_float_gets_a_hint() -> None:
    """I8: the hint recommends minor units."""
    with pytest.raises(Invalid) as refused:
        canonical.dumps({"price": 19.99})
    assert refused.value.hint is not None
    assert "minor units" in refused.value.hint
