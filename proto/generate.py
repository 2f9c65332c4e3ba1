"""Generates slotcar.v1's Python code, its type stubs and the API reference from the .proto files: `make proto`."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pb2 as d
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
REPOSITORY = PROTO.parent
SOURCES = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("slotcar/v1/*.proto"))

# Field numbers of FileDescriptorProto and its children, as SourceCodeInfo paths use them.
_MESSAGE, _ENUM, _SERVICE, _FIELD, _VALUE, _METHOD = 4, 5, 6, 2, 2, 2

_SCALARS = {
    d.FieldDescriptorProto.TYPE_BOOL: "bool",
    d.FieldDescriptorProto.TYPE_BYTES: "bytes",
    d.FieldDescriptorProto.TYPE_DOUBLE: "double",
    d.FieldDescriptorProto.TYPE_STRING: "string",
    d.FieldDescriptorProto.TYPE_UINT32: "uint32",
    d.FieldDescriptorProto.TYPE_UINT64: "uint64",
}


def _run(*arguments: str) -> None:
    include = str(resources.files("grpc_tools") / "_proto")
    if protoc.main(["protoc", f"-I{PROTO}", f"-I{include}", *arguments, *SOURCES]) != 0:
        raise SystemExit(1)


def generate_code(out: Path) -> None:
    """Writes *_pb2.py, *_pb2_grpc.py and their stubs below `out`."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    out.mkdir(parents=True, exist_ok=True)
    _run(f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out={out}", f"--mypy_grpc_out={out}")
    for source in SOURCES:
        if "service" not in source.lower():
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (out / source.replace(".proto", suffix)).unlink(missing_ok=True)


def generate_reference(out: Path) -> None:
    """Writes the API reference, one Markdown file, from the comments in the .proto files."""
    descriptors = out.with_suffix(".descriptors")
    _run(f"--descriptor_set_out={descriptors}", "--include_source_info")
    files = d.FileDescriptorSet.FromString(descriptors.read_bytes()).file
    descriptors.unlink()
    lines = ["# API reference", "", "Made from the comments in `proto/slotcar/v1` by `make proto`; do not edit.", ""]
    for file in sorted(files, key=lambda file: (not file.service, file.name)):
        lines += [f"## {Path(file.name).name}", ""]
        lines += _Reference(file).lines()
    out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


class _Reference:
    """The Markdown of one .proto file."""

    def __init__(self, file: d.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
        }

    def lines(self) -> list[str]:
        lines: list[str] = []
        for index, service in enumerate(self._file.service):
            lines += self._section("service", service.name, (_SERVICE, index), "| rpc | request | response | |")
            for number, method in enumerate(service.method):
                comment = self._comments[(_SERVICE, index, _METHOD, number)]
                request = ("stream " if method.client_streaming else "") + _short(method.input_type)
                response = ("stream " if method.server_streaming else "") + _short(method.output_type)
                lines.append(f"| `{method.name}` | `{request}` | `{response}` | {comment} |")
            lines.append("")
        for index, message in enumerate(self._file.message_type):
            lines += self._section("message", message.name, (_MESSAGE, index), "| field | type | number | |")
            for number, field in enumerate(message.field):
                comment = self._comments[(_MESSAGE, index, _FIELD, number)]
                lines.append(f"| `{field.name}` | {_type(field, message)} | {field.number} | {comment} |")
            lines.append("")
        for index, enum in enumerate(self._file.enum_type):
            lines += self._section("enum", enum.name, (_ENUM, index), "| value | number | |")
            for number, value in enumerate(enum.value):
                lines.append(f"| `{value.name}` | {value.number} | {self._comments[(_ENUM, index, _VALUE, number)]} |")
            lines.append("")
        return lines

    def _section(self, kind: str, name: str, path: tuple[int, ...], header: str) -> list[str]:
        rule = "|" + "---|" * (header.count("|") - 1)
        return [f"### {kind} {name}", "", self._comments[path], "", header, rule]


def _short(type_name: str) -> str:
    return type_name.removeprefix(".slotcar.v1.").lstrip(".")


def _type(field: d.FieldDescriptorProto, message: d.DescriptorProto) -> str:
    name = _SCALARS.get(field.type) or _short(field.type_name)
    nested = {entry.name: entry for entry in message.nested_type}
    if name.rpartition(".")[2] in nested:
        key, value = nested[name.rpartition(".")[2]].field
        return f"`map<{_SCALARS[key.type]}, {_SCALARS[value.type]}>`"
    if field.label == d.FieldDescriptorProto.LABEL_REPEATED:
        return f"`repeated {name}`"
    if field.proto3_optional:
        return f"`optional {name}`"
    if field.HasField("oneof_index"):
        return f"`{name}` (one of `{message.oneof_decl[field.oneof_index].name}`)"
    return f"`{name}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", type=Path, default=PROTO, help="folder for the generated code")
    parser.add_argument("--reference", type=Path, default=REPOSITORY / "docs" / "api.md", help="file for the reference")
    arguments = parser.parse_args()
    generate_code(arguments.code)
    generate_reference(arguments.reference)


if __name__ == "__main__":
    main()
