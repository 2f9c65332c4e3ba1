"""What the chart uses of custom resources, as cert-manager 1.17 and the Prometheus operator 0.80 define them.

No cluster's definitions are there to validate with, so these are schemas of ours, of the fields that the chart has and
no others: a field of another name is refused.
"""

from __future__ import annotations

from typing import Any

from jsonschema.validators import Draft202012Validator

Json = dict[str, Any]
_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_HOURS = {"type": "string", "pattern": "^[0-9]+h$"}
_SECONDS = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}


def _object(required: Json, optional: Json | None = None) -> Json:
    properties = required | (optional or {})
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


_CERTIFICATE = _object(
    {
        "secretName": _TEXT,
        "issuerRef": _object({"name": _TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": _TEXT}),
        "duration": _HOURS,
        "privateKey": _object(
            {"algorithm": {"const": "ECDSA"}, "size": {"enum": [256, 384, 521]}},
            {"rotationPolicy": {"enum": ["Never", "Always"]}},
        ),
    },
    {
        "isCA": {"type": "boolean"},
        "commonName": {"type": "string", "maxLength": 64},
        "dnsNames": {"type": "array", "minItems": 1, "items": _TEXT},
        "renewBefore": _HOURS,
        "usages": {"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
    },
)
_ISSUER = {
    "oneOf": [_object({"selfSigned": {"const": {}}}), _object({"ca": _object({"secretName": _TEXT})})],
}
_POD_MONITOR = _object(
    {
        "selector": _object({"matchLabels": _TEXTS}),
        "podMetricsEndpoints": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {"port": {"type": "string", "maxLength": 15}, "path": {"const": "/metrics"}, "interval": _SECONDS},
                {"relabelings": {"type": "array", "items": _object({"targetLabel": _TEXT, "replacement": _TEXT})}},
            ),
        },
    },
    {"namespaceSelector": _object({"any": {"const": True}})},
)
_RULE = {
    "oneOf": [
        _object({"record": _TEXT, "expr": _TEXT}),
        _object({"alert": _TEXT, "expr": _TEXT, "labels": _TEXTS, "annotations": _TEXTS}, {"for": _SECONDS}),
    ]
}
_PROMETHEUS_RULE = _object(
    {"groups": {"type": "array", "items": _object({"name": _TEXT, "rules": {"type": "array", "items": _RULE}})}}
)
_SPECS = {
    ("cert-manager.io/v1", "Certificate"): _CERTIFICATE,
    ("cert-manager.io/v1", "Issuer"): _ISSUER,
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
}


def is_custom(of: Json) -> bool:
    return (of["apiVersion"], of["kind"]) in _SPECS


def check(of: Json) -> None:
    """Raises jsonschema's ValidationError for what the definition has not."""
    metadata = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS}, {"annotations": _TEXTS})
    spec = _SPECS[of["apiVersion"], of["kind"]]
    schema = _object({"apiVersion": _TEXT, "kind": _TEXT, "metadata": metadata, "spec": spec})
    Draft202012Validator(schema).validate(of)
