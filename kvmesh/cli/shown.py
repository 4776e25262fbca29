"""What peers say, fit to be shown on a terminal. Called where the commands receive it, so that no drawing needs to."""

from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvmesh.telemetry.plain import plain

_MAX_CHARS = 300
"""Of one text: names and addresses are shorter, errors end there."""

_Message = TypeVar("_Message", bound=Message)


def shown(message: _Message) -> _Message:
    """The same message; each text in it is plain and not long."""
    for field, value in message.ListFields():
        repeated = field.is_repeated
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _show_map(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if repeated else (value,):
                shown(part)
        elif field.type == FieldDescriptor.TYPE_STRING and repeated:
            value[:] = [_short(text) for text in value]
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, _short(value))
    return message


def _show_map(texts: dict[str, str]) -> None:
    """Of texts; the contracts have no other map."""
    plainly = {_short(key): _short(value) for key, value in texts.items()}
    texts.clear()
    texts.update(plainly)


def _short(text: str) -> str:
    return plain(text[:_MAX_CHARS])
