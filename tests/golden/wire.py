"""Prints everything of slotcar.v1 that is visible on the wire, one line each: `make golden`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as d

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("slotcar.v1.txt")


def describe() -> str:
    """Messages with fields, numbers and types, enums with values, and services with calls, by file."""
    lines: list[str] = []
    for source in sorted((REPOSITORY / "proto" / "slotcar" / "v1").glob("*.proto")):
        file = d.FileDescriptorProto()
        importlib.import_module(f"slotcar.v1.{source.stem}_pb2").DESCRIPTOR.CopyToProto(file)
        lines.append(f"file {file.name}")
        for message in file.message_type:
            lines += _message(message, file.package)
        for enum in file.enum_type:
            lines += _enum(enum, file.package)
        for service in file.service:
            lines += _service(service, file.package)
    return "\n".join(lines) + "\n"


def _message(message: d.DescriptorProto, scope: str) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield f"  message {name}{' (map entry)' if message.options.map_entry else ''}"
    for field in message.field:
        label = "" if field.label == field.LABEL_OPTIONAL else f"{_enum_name(field, 'Label', field.label)} "
        presence = "optional " if field.proto3_optional else ""
        kind = field.type_name.lstrip(".") or _enum_name(field, "Type", field.type)
        oneof = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            oneof = f" in {message.oneof_decl[field.oneof_index].name}"
        yield f"    {field.number} {field.name}: {label}{presence}{kind}{oneof}"
    for span in message.reserved_range:
        yield f"    reserved {span.start} to {span.end - 1}"
    for reserved in message.reserved_name:
        yield f"    reserved {reserved}"
    for nested in message.nested_type:
        yield from _message(nested, name)
    for enum in message.enum_type:
        yield from _enum(enum, name)


def _enum(enum: d.EnumDescriptorProto, scope: str) -> Iterator[str]:
    yield f"  enum {scope}.{enum.name}"
    for value in enum.value:
        yield f"    {value.number} {value.name}"
    for span in enum.reserved_range:
        yield f"    reserved {span.start} to {span.end}"
    for reserved in enum.reserved_name:
        yield f"    reserved {reserved}"


def _service(service: d.ServiceDescriptorProto, scope: str) -> Iterator[str]:
    yield f"  service {scope}.{service.name}"
    for method in service.method:
        request = f"{'stream ' if method.client_streaming else ''}{method.input_type.lstrip('.')}"
        response = f"{'stream ' if method.server_streaming else ''}{method.output_type.lstrip('.')}"
        yield f"    {method.name}({request}) returns ({response})"


def _enum_name(field: d.FieldDescriptorProto, enum: str, number: int) -> str:
    """The word of a .proto file for a field's type or label, such as "uint32" or "repeated"."""
    value = field.DESCRIPTOR.enum_types_by_name[enum].values_by_number[number]
    return value.name.partition("_")[2].lower()


if __name__ == "__main__":
    sys.stdout.write(describe())
