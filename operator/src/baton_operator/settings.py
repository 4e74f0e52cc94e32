"""The operator's settings, from BATON_ environment variables; read once, in `main`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from baton_operator.names import is_own_key

PREFIX = "BATON_"
MAX_PORT = 65535
_CLOSE = 0.85
"""How much an unknown variable looks like a setting to be taken for a misspelt one."""
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"(?=[^/]{1,253}/|[^/]+$)([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_NAMESPACE = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?")


class SettingError(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is read from BATON_ and its name in capitals.

    Attributes:
        watch_namespace: serve this namespace only; empty serves all (needs a ClusterRole).
        workers: reconciles that run at once.
        write_concurrency: API writes in flight at once, over all reconciles.
        resync_seconds: how often an object is reconciled without an event; jittered by a fifth.
        status_interval_seconds: least time between two status writes of one object that report
            counts alone.
        upgrade_models: models that may roll at once because a new operator makes their pods
            otherwise; what users change rolls whenever they change it.
        pod_monitor_labels: labels of every model's PodMonitor beside the operator's own, as
            `key=value,key=value`: what the Prometheus that shall select them asks for.
        watch_secrets: repair the CURVE Secret from its (metadata) watch; without it, at a start.
        leader_elect: take the Lease before serving; needed for two replicas.
        lease_name: name of the Lease.
        lease_namespace: namespace of the Lease; empty is the pod's own.
        lease_duration_seconds: a standby waits this long for a leader that fell silent.
        lease_renew_seconds: a leader that cannot renew for this long stops.
        lease_retry_seconds: pause between attempts.
        http_host: where health and metrics listen; * is every address, IPv6 and IPv4.
        http_port: port of /healthz, /readyz and /metrics.
        pod_probe_seconds: longest wait for a pod's answer when choosing whom to scale in.
        stuck_seconds: a key that waits or runs longer makes /healthz fail.
        log_level: debug, info, warning or error.
        log_format: text or json.
        identity: name of this process in the Lease; empty is host name and pid.
    """

    watch_namespace: str = ""
    workers: int = 8
    write_concurrency: int = 32
    resync_seconds: float = 1800.0
    status_interval_seconds: float = 1.0
    upgrade_models: int = 2
    pod_monitor_labels: str = ""
    watch_secrets: bool = True
    leader_elect: bool = True
    lease_name: str = "baton-operator"
    lease_namespace: str = ""
    lease_duration_seconds: float = 12.0
    lease_renew_seconds: float = 8.0
    lease_retry_seconds: float = 2.0
    http_host: str = "*"
    http_port: int = 8080
    pod_probe_seconds: float = 2.0
    stuck_seconds: float = 300.0
    log_level: str = "info"
    log_format: str = "json"
    identity: str = ""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings.

    Raises:
        SettingError: a value cannot be used, or a variable is a setting's but for its spelling.
    """
    _refuse_misspelt(environment)
    types = get_type_hints(Settings)
    values: dict[str, Any] = {}
    for field in fields(Settings):
        variable = PREFIX + field.name.upper()
        if variable in environment:
            values[field.name] = _parse(variable, environment[variable], types[field.name])
    settings = Settings(**values)
    _check(settings)
    return settings


def _refuse_misspelt(environment: Mapping[str, str]) -> None:
    """A setting that is not read has its default, and that of a namespace is every one."""
    known = [field.name.upper() for field in fields(Settings)]
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known:
            continue
        if close := difflib.get_close_matches(name, known, 1, _CLOSE):
            raise SettingError(f"{variable} is no setting: did you mean {PREFIX}{close[0]}?")


_KINDS = {int: "a whole number", float: "a number"}


def _parse(variable: str, text: str, type_: type) -> Any:
    if type_ is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise SettingError(f"{variable} is {text!r}; it must be true or false")
        return text.lower() in ("true", "1")
    try:
        return type_(text)
    except ValueError as error:
        raise SettingError(f"{variable} is {text!r}; it must be {_KINDS[type_]}") from error


def _check(settings: Settings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not (value > 0 and math.isfinite(value)):
            raise SettingError(
                f"{PREFIX}{field.name.upper()} is {value}; it must be above 0, and finite"
            )
    if settings.http_port > MAX_PORT:
        raise SettingError(f"{PREFIX}HTTP_PORT is {settings.http_port}; the most is {MAX_PORT}")
    for variable in ("watch_namespace", "lease_namespace"):
        if not _NAMESPACE.fullmatch(getattr(settings, variable)):
            raise SettingError(
                f"{PREFIX}{variable.upper()} is {getattr(settings, variable)!r}; it must be one "
                "namespace's name: lower case letters, digits and -"
            )
    labels_of(settings.pod_monitor_labels)
    _check_lease_and_logs(settings)


def labels_of(text: str) -> dict[str, str]:
    """Return the labels that the setting of PodMonitors names.

    Raises:
        SettingError: they are none, or one is ours.
    """
    labels: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, is_pair, value = part.partition("=")
        if not (is_pair and _LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            why = "it must be labels as key=value,key=value"
        elif is_own_key(key):
            why = f"{key} is the operator's own, take it away"
        elif key in labels:
            why = f"{key} is there twice, take one away"
        else:
            labels[key] = value
            continue
        raise SettingError(f"{PREFIX}POD_MONITOR_LABELS is {text!r}; {why}")
    return labels


def _check_lease_and_logs(settings: Settings) -> None:
    if settings.lease_renew_seconds >= settings.lease_duration_seconds:
        raise SettingError(
            f"{PREFIX}LEASE_RENEW_SECONDS is {settings.lease_renew_seconds}; it must be below "
            f"{PREFIX}LEASE_DURATION_SECONDS ({settings.lease_duration_seconds})"
        )
    if settings.lease_renew_seconds <= 1.2 * settings.lease_retry_seconds:
        raise SettingError(
            f"{PREFIX}LEASE_RENEW_SECONDS is {settings.lease_renew_seconds}; it must be above "
            f"1.2 times {PREFIX}LEASE_RETRY_SECONDS ({settings.lease_retry_seconds})"
        )
    if settings.log_format not in ("text", "json"):
        raise SettingError(f"{PREFIX}LOG_FORMAT is {settings.log_format!r}; text or json")
    if settings.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise SettingError(
            f"{PREFIX}LOG_LEVEL is {settings.log_level!r}; debug, info, warning or error"
        )
