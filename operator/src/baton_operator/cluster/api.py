"""The Kubernetes API as the operator uses it: kinds, errors, and the `KubeApi` protocol.

Everything above talks to this protocol; `kube` implements it over HTTP, tests in memory. Knows no
object of ours by content.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from baton_operator.names import API_VERSION

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource type. `has_generation`: the server counts changes of its spec."""

    api_version: str
    kind: str
    plural: str
    has_generation: bool = False

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the URL path; an empty namespace means all of them."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural]
        return "/".join([*parts, *filter(None, (name, subresource))])


PD_DEPLOYMENT = Kind(API_VERSION, "PDDeployment", "pddeployments", has_generation=True)
SCALER = Kind(API_VERSION, "PDRoleScaler", "pdrolescalers", has_generation=True)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments", has_generation=True)
POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
DISRUPTION_BUDGET = Kind(
    "policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", has_generation=True
)
NETWORK_POLICY = Kind(
    "networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", has_generation=True
)
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors", has_generation=True)
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

CHILD_KINDS = (
    DEPLOYMENT, SCALER, SERVICE, CONFIG_MAP, SECRET, SERVICE_ACCOUNT, DISRUPTION_BUDGET,
    NETWORK_POLICY,
)  # fmt: skip
OPTIONAL_KINDS = (POD_MONITOR,)
_BY_NAME = {k.kind: k for k in (*CHILD_KINDS, *OPTIONAL_KINDS, POD, PD_DEPLOYMENT, EVENT)}


def kind_of(manifest: Json) -> Kind:
    """Return the kind of a manifest that we render."""
    return _BY_NAME[manifest["kind"]]


UNREADABLE = "Unreadable"
"""Why an answer, or a line of a watch, that is none of Kubernetes' counts as a failure."""

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises; of text that is not UTF-8, within JSON that is, no error of msgspec's."""


class ApiError(Exception):
    """The API server refused or failed. `status` is the HTTP code, 0 when it was not reached."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason

    @property
    def is_refusal(self) -> bool:
        """Whether the same request would be refused again: the server works, and says no."""
        return 400 <= self.status < 500 and self.status not in (408, 409, 429)


class Conflict(ApiError):
    """409: another writer was faster, or a precondition does not hold."""


class AlreadyExists(ApiError):
    """409 on create."""


class Expired(ApiError):
    """410: the resource version to watch from is gone; list again."""


class NamespaceEnds(ApiError):
    """403 on create: the namespace is being deleted, and nothing is made in it ever again."""


class Throttled(ApiError):
    """429, or 503 with a wait; `retry_after_seconds` is what the server asks for."""

    def __init__(self, status: int, message: str, retry_after_seconds: float) -> None:
        super().__init__(status, "TooManyRequests", message)
        self.retry_after_seconds = retry_after_seconds


class ListPage(NamedTuple):
    """One page of a list: undecoded items, the version to watch from, the next page's token."""

    items: list[bytes]
    resource_version: str
    token: str


class Created(NamedTuple):
    """An object that was created and not applied yet.

    `entry` is the place in its managedFields that says what it was created with.
    """

    namespace: str
    name: str
    uid: str
    entry: int


class KubeApi(Protocol):
    """What the operator asks of the API server.

    Every call may raise ApiError and suspends; none retries by itself. Returned bodies belong to
    the caller.
    """

    async def get(
        self, kind: Kind, namespace: str, name: str, *, is_metadata_only: bool = False
    ) -> Json | None:
        """Return the object, or None when there is none."""
        ...

    async def apply(self, kind: Kind, manifest: Json, manager: str, *, uid: str) -> bytes:
        """Server-side apply `manifest`, taking conflicting fields; return the object, undecoded.

        `uid` is that of the object to change. Raises Conflict when there is no such object.
        """
        ...

    async def create(self, kind: Kind, manifest: Json, manager: str) -> bytes:
        """Create, refusing unknown fields; return the object, undecoded. Raises AlreadyExists."""
        ...

    async def hand_over(self, kind: Kind, created: Created, manager: str) -> None:
        """Let fields that `manager` created an object with count as applied by it.

        An apply takes away what the manager applied before and no longer wishes, but nothing that
        it created. Raises Conflict when the object has no such entry there.
        """
        ...

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: Json, subresource: str = ""
    ) -> Json:
        """Merge-patch the object or its subresource. A uid in the patch is a precondition."""
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Delete this very object in the background; one that is gone is no error."""
        ...

    async def has_api(self, kind: Kind) -> bool:
        """Whether the server serves this kind."""
        ...

    async def list_page(
        self, kind: Kind, namespace: str, selector: str, *, is_metadata_only: bool, token: str
    ) -> ListPage:
        """Return one page of a list."""
        ...

    def watch(
        self,
        kind: Kind,
        namespace: str,
        selector: str,
        resource_version: str,
        *,
        is_metadata_only: bool,
    ) -> AsyncGenerator[bytes]:
        """Yield watch events, one JSON document each, until the server ends the stream."""
        ...
