"""Writes docs/report_schema.json, the JSON schema of `DonationReport.to_dict()`, from the classes of the report."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "report_schema.json"
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    from torch_xla_donate._report import report

    computed = ("donated_bytes", "reused_fraction", "crossed", "compilations", "copied_bytes")
    whole = _object(report.DonationReport, computed)
    whole["properties"]["complete"] = {"type": "boolean", "description": "`bool(report)`"}
    whole["required"].append("complete")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "DonationReport.to_dict()",
        **whole,
        "definitions": {
            "Donor": _object(report.Donor, ("array",)),
            "Step": _object(report.Step),
            "HeldInput": _object(report.HeldInput),
        },
    }


def _object(kind: type, computed: tuple[str, ...] = ()) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    texts = dict(re.findall(r"^    (\w+): ((?:.|\n {8})+)", inspect.getdoc(kind) or "", re.MULTILINE))
    found = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for name in computed:
        getter = vars(kind)[name].fget
        found[name], texts[name] = typing.get_type_hints(getter)["return"], inspect.getdoc(getter)
    return {
        "type": "object",
        "properties": {
            name: _of(hint) | ({"description": " ".join(texts[name].split())} if name in texts else {})
            for name, hint in found.items()
        },
        "required": list(found),
        "additionalProperties": False,
    }


def _of(hint: Any) -> dict[str, Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(part) for part in parts]}
    if origin is tuple:
        return {"type": "array", "items": _of(parts[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(parts[1])}
    if issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    return {"$ref": f"#/definitions/{hint.__name__}"}


def text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
