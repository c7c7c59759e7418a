from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from areal_async.rpc import messages, schema
from areal_async.rpc.frames import MODULES, REPLIES, REQUESTS, Kind, read_reply, read_request, write_frames
from areal_async.rpc.schema import Message, Request

text = st.text(max_size=8)
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    inspect.IntType: st.integers(-(2**63), 2**63 - 1),
    inspect.FloatType: st.floats(allow_nan=False),
    inspect.StrType: text,
    inspect.BoolType: st.booleans(),
    inspect.BytesType: st.binary(max_size=16),
    inspect.NoneType: st.none(),
    inspect.AnyType: st.recursive(
        st.none() | st.booleans() | st.integers(-5, 5) | text,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
        max_leaves=4,
    ),
}


def values(info: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a msgspec type."""
    if isinstance(info, inspect.StructType):
        return st.builds(info.cls, **{field.name: values(field.type) for field in info.fields})
    if isinstance(info, inspect.ListType):
        return st.lists(values(info.item_type), max_size=3)
    if isinstance(info, inspect.VarTupleType):
        return st.lists(values(info.item_type), max_size=3).map(tuple)
    if isinstance(info, inspect.NamedTupleType):
        return st.builds(info.cls, *(values(field.type) for field in info.fields))
    if isinstance(info, inspect.TupleType):
        return st.tuples(*map(values, info.item_types))
    if isinstance(info, inspect.DictType):
        return st.dictionaries(values(info.key_type), values(info.value_type), max_size=3)
    if isinstance(info, inspect.UnionType):
        return st.one_of([values(one) for one in info.types])
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, inspect.EnumType):
        return st.sampled_from(info.cls)
    return SCALARS[type(info)]


def test_every_message_is_a_request_or_a_reply():
    defined = {
        value
        for module in (schema, *MODULES)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value not in (Message, Request)
    }
    assert defined == {*REQUESTS, *REPLIES}
    assert not {*REQUESTS} & {*REPLIES}


@pytest.mark.parametrize("message_type", [*REQUESTS, *REPLIES], ids=lambda t: t.__name__)
@given(st.data())
@settings(max_examples=25)
def test_every_message_comes_back_as_it_was(message_type, data):
    message = data.draw(values(inspect.type_info(message_type)))
    (head,) = write_frames(Kind.REQUEST, 1, 2, 3, message, ())
    read = read_request if message_type in REQUESTS else read_reply
    assert read(bytes(head)) == message


def test_fields_added_by_a_later_version_are_ignored():
    body = msgspec.msgpack.encode({"type": "Commit", "policy": "policy", "epoch": 1, "step": 2, "later": [1]})
    (head,) = write_frames(Kind.REQUEST, 1, 2, 3, None, ())
    assert read_request(bytes(head) + body) == messages.Commit("policy", 1, 2)
