"""From msgspec structs to structural OpenAPI v3 schemas, as apiextensions.k8s.io/v1 wants them.

msgspec gives JSON Schema with `$ref`; a structural schema has none, names a type everywhere, and
says `null` differently. Owns that translation and nothing of what the fields mean.
"""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]

_KEPT = (
    "type", "description", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern",
    "minItems", "maxItems", "default", "required", "format", "additionalProperties",
    "x-kubernetes-validations", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip


def structural_schema(model: type, *, has_defaults: bool = True) -> Json:
    """Return the structural schema of a struct, every reference expanded.

    Without defaults, as for a status, an absent field stays absent: not observed is not zero.
    """
    (root,), definitions = msgspec.json.schema_components([model], ref_template="{name}")
    schema = _structural(root, definitions)
    return schema if has_defaults else _without_defaults(schema)


def _without_defaults(schema: Json) -> Json:
    kept = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in kept:
        kept["properties"] = {
            name: _without_defaults(child) for name, child in kept["properties"].items()
        }
    if "items" in kept:
        kept["items"] = _without_defaults(kept["items"])
    return kept


def _structural(node: Json, definitions: Json) -> Json:
    node = _expand(node, definitions)
    result = {key: node[key] for key in _KEPT if key in node}
    if "type" not in result and "enum" in result:
        result["type"] = "integer" if isinstance(result["enum"][0], int) else "string"
    if "properties" in node:
        result["properties"] = {
            name: _structural(child, definitions) for name, child in node["properties"].items()
        }
    if result.get("type") == "array":
        result["items"] = _structural(node.get("items", {"type": "object"}), definitions)
    if result.get("type") == "object" and "properties" not in result:
        result.pop("additionalProperties", None)
    return result


def _expand(node: Json, definitions: Json) -> Json:
    """Return a node with references and `X or null` resolved; the outer description wins."""
    merged = dict(node)
    if "anyOf" in merged:
        merged.pop("default", None)
        real = [choice for choice in merged.pop("anyOf") if choice.get("type") != "null"]
        merged = {**_expand(real[0], definitions), **merged}
    if "$ref" in merged:
        target = definitions[merged.pop("$ref")]
        merged = {**_expand(target, definitions), **merged}
    return merged
