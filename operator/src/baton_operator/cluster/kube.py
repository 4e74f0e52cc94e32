"""`KubeApi` over HTTP: configuration, TLS and credentials from `kubernetes.aio`, JSON by msgspec.

The client's own request path encodes and walks every body several times in Python; at the rate
that children are written that is most of the operator's CPU, so requests go straight to its
session. Nothing here retries: the work queue does.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
from kubernetes.aio import client, config
from yarl import URL

from baton_operator.cluster.api import (
    UNDECODABLE,
    UNREADABLE,
    ApiError,
    Conflict,
    Created,
    Json,
    Kind,
    ListPage,
)
from baton_operator.cluster.nesting import bounded
from baton_operator.cluster.refusals import refusal
from baton_operator.settings import SettingError

_METADATA_ONLY = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=10)
_WATCH_SECONDS = 300
_SILENCE_SECONDS = 90
"""A stream that is silent for longer is opened again: it may be dead."""

_CREDENTIAL_SECONDS = 30.0

PAGE_SIZE = 500

Observer = Callable[[str, str, int, float], None]
"""Called after every request with verb, kind, HTTP status (0: not reached) and seconds."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    token: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None  # Go writes null for an empty list


_encode = msgspec.json.Encoder().encode
_json = msgspec.json.Decoder(dict[str, Any])
_list = msgspec.json.Decoder(_List)
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _Request:
    verb: str
    kind: Kind
    method: str
    path: str
    query: str = ""
    accept: str = "application/json"
    content_type: str = "application/json"
    body: bytes | None = None


class HttpKube:
    """See `api.KubeApi`. Use `connect` to make one and `close` when done."""

    def __init__(self, api: client.ApiClient, observe: Observer) -> None:
        self._api = api
        self._host = str(api.configuration.host).rstrip("/")
        self._observe = observe
        self._headers: dict[str, str] = {}
        self._credentials_until = 0.0
        # Overridable by kubernetes.aio's contract; carries the TLS settings of the configuration.
        self._session: aiohttp.ClientSession = api.rest_client._create_pool_manager()

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._api.close()

    async def get(
        self, kind: Kind, namespace: str, name: str, *, is_metadata_only: bool = False
    ) -> Json | None:
        """See `KubeApi`."""
        accept = _accept(is_metadata_only, "")
        request = _Request("get", kind, "GET", kind.path(namespace, name), "", accept)
        try:
            return await self._ask(request, _json)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, kind: Kind, manifest: Json, manager: str, *, uid: str) -> bytes:
        """See `KubeApi`."""
        metadata = {**manifest["metadata"], "uid": uid}
        path = kind.path(metadata["namespace"], metadata["name"])
        query = _apply_query(manager)
        body = _encode({**manifest, "metadata": metadata})
        request = _Request("apply", kind, "PATCH", path, query, content_type=_APPLY, body=body)
        return await self._send(request)

    async def create(self, kind: Kind, manifest: Json, manager: str) -> bytes:
        """See `KubeApi`."""
        path = kind.path(manifest["metadata"]["namespace"])
        query = _create_query(manager)
        request = _Request("create", kind, "POST", path, query, body=_encode(manifest))
        return await self._send(request)

    async def hand_over(self, kind: Kind, created: Created, manager: str) -> None:
        """See `KubeApi`."""
        entry = f"/metadata/managedFields/{created.entry}"
        patch = (
            {"op": "test", "path": "/metadata/uid", "value": created.uid},
            {"op": "test", "path": f"{entry}/manager", "value": manager},
            {"op": "test", "path": f"{entry}/operation", "value": "Update"},
            {"op": "replace", "path": f"{entry}/operation", "value": "Apply"},
        )
        path = kind.path(created.namespace, created.name)
        query = urlencode({"fieldManager": manager})
        body = _encode(patch)
        request = _Request("patch", kind, "PATCH", path, query, content_type=_JSON_PATCH, body=body)
        try:
            await self._send(request)
        except ApiError as error:
            # 422 is a test that failed, 404 an object that is gone: it is not what we know.
            if error.status in (404, 422):
                raise Conflict(error.status, error.reason, str(error)) from error
            raise

    async def merge(
        self, kind: Kind, namespace: str, name: str, patch: Json, subresource: str = ""
    ) -> Json:
        """See `KubeApi`."""
        path = kind.path(namespace, name, subresource)
        manager = "baton-operator-status" if subresource else "baton-operator"
        query = urlencode({"fieldManager": manager})
        body = _encode(patch)
        request = _Request("patch", kind, "PATCH", path, query, content_type=_MERGE, body=body)
        return await self._ask(request, _json)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """See `KubeApi`."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        path = kind.path(namespace, name)
        request = _Request("delete", kind, "DELETE", path, body=_encode(options))
        try:
            await self._send(request)
        except ApiError as error:
            # 409 is the uid precondition: that very object is gone, another has its name.
            if error.status not in (404, 409):
                raise

    async def has_api(self, kind: Kind) -> bool:
        """See `KubeApi`."""
        request = _Request("discover", kind, "GET", f"/apis/{kind.api_version}")
        try:
            listing = await self._ask(request, _json)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(r.get("name") == kind.plural for r in listing.get("resources") or ())

    async def list_page(
        self, kind: Kind, namespace: str, selector: str, *, is_metadata_only: bool, token: str
    ) -> ListPage:
        """See `KubeApi`."""
        query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
        if token:
            query["continue"] = token
        accept = _accept(is_metadata_only, "List")
        request = _Request("list", kind, "GET", kind.path(namespace), urlencode(query), accept)
        page = await self._ask(request, _list)
        items = [bytes(item) for item in page.items or ()]
        return ListPage(items, page.metadata.resource_version, page.metadata.token)

    async def watch(
        self,
        kind: Kind,
        namespace: str,
        selector: str,
        resource_version: str,
        *,
        is_metadata_only: bool,
    ) -> AsyncGenerator[bytes]:
        """See `KubeApi`."""
        query = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        accept = _accept(is_metadata_only, "")
        request = _Request("watch", kind, "GET", kind.path(namespace), urlencode(query), accept)
        limits = aiohttp.ClientTimeout(total=None, connect=10, sock_read=_SILENCE_SECONDS)
        async with await self._open(request, limits) as response:
            if response.status != 200:
                raise refusal(response.status, await _page(response), response.headers)
            try:
                async for line in response.content:
                    if line.strip():
                        yield line
            except TimeoutError:
                # Bookmarks may be ten minutes apart on a kind without objects: silence is no
                # failure, and opening a new stream from the same version tells the dead apart.
                return
            except aiohttp.ClientError as error:
                raise ApiError(0, "Unreachable", f"watch {kind.plural}: {error!r}") from error

    async def _ask(self, request: _Request, decoder: msgspec.json.Decoder[_Answer]) -> _Answer:
        data = await self._send(request)
        try:
            return _decoded(data, decoder)
        except UNDECODABLE as error:  # a proxy's page, or an answer that was cut
            where = f"{request.method} {request.path}"
            raise ApiError(0, UNREADABLE, f"{where}: {error}") from error

    async def _send(self, request: _Request) -> bytes:
        started = time.monotonic()
        status = 0
        try:
            async with await self._open(request, _TIMEOUT) as response:
                status = response.status
                data: bytes = await response.read()
                headers = response.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            where = f"{request.method} {request.path}"
            raise ApiError(0, "Unreachable", f"{where}: {error!r}") from error
        finally:
            seconds = time.monotonic() - started
            self._observe(request.verb, request.kind.kind, status, seconds)
        if 200 <= status < 300:
            return data
        raise refusal(status, data, headers, is_create=request.verb == "create")

    async def _credentials(self) -> dict[str, str]:
        """Return authentication headers, read again now and then: tokens are rotated while we run.

        The library reads them in a thread; once a request, that was most of a request's wait.
        """
        if time.monotonic() >= self._credentials_until:
            headers: dict[str, str] = {}
            await self._api.update_params_for_auth(headers, [], ["BearerToken"], "/", "GET", None)
            self._headers = headers
            self._credentials_until = time.monotonic() + _CREDENTIAL_SECONDS
        return self._headers

    async def _open(
        self, request: _Request, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": request.accept, "User-Agent": "baton-operator"}
        headers |= await self._credentials()
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        query = f"?{request.query}" if request.query else ""
        try:
            return await self._session.request(
                request.method,
                # Names are DNS labels and the query is encoded: nothing is left to be quoted.
                URL(f"{self._host}{request.path}{query}", encoded=True),
                data=request.body,
                headers=headers,
                timeout=limits,
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            where = f"{request.method} {request.path}"
            raise ApiError(0, "Unreachable", f"{where}: {error!r}") from error


def _decoded(data: bytes, decoder: msgspec.json.Decoder[_Answer]) -> _Answer:
    try:
        return decoder.decode(data)
    except RecursionError:
        return decoder.decode(bounded(data))


async def _page(response: aiohttp.ClientResponse) -> bytes:
    """Return what a refusal says; it is one all the same when that does not come whole."""
    try:
        return await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error).encode()


async def connect(observe: Observer) -> HttpKube:
    """Return a client: in a pod by its service account, elsewhere by KUBECONFIG.

    Raises:
        SettingError: neither says where the API server is.
    """
    configuration = client.Configuration()
    try:
        await _find_server(configuration)
    except (config.ConfigException, OSError) as error:
        named = os.environ.get("KUBECONFIG", "")
        raise SettingError(
            f"KUBECONFIG is {named!r}: {error}; it names a file with a current-context "
            "(~/.kube/config without it); in a pod leave it out, and mount the service account"
        ) from error
    configuration.connection_pool_maxsize = 64
    # Left to the session, netrc and proxies are looked up in a thread before each request.
    proxy = configuration.proxy or environment_proxy(configuration.host)
    configuration.client_session_kwargs = {
        "trust_env": False,
        "proxy": proxy,
        "cookie_jar": aiohttp.DummyCookieJar(),
    }
    return HttpKube(client.ApiClient(configuration), observe)


async def _find_server(configuration: client.Configuration) -> None:
    if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(client_configuration=configuration)


def environment_proxy(url: str) -> str | None:
    """Return the proxy that the environment's HTTPS_PROXY and NO_PROXY name for a URL."""
    parts = urlsplit(url)
    if parts.hostname is None or urllib.request.proxy_bypass(parts.hostname):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def own_namespace(default: str) -> str:
    """Return the namespace of the pod that we run in, else `default`."""
    path = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return path.read_text().strip() if path.exists() else default


@cache
def _create_query(manager: str) -> str:
    # As an apply does by itself: a misspelt field in a pod template is refused, not dropped.
    return urlencode({"fieldManager": manager, "fieldValidation": "Strict"})


@cache
def _apply_query(manager: str) -> str:
    # By default the server parses an apply's text once more, for warnings that nobody reads.
    return urlencode({"fieldManager": manager, "force": "true", "fieldValidation": "Ignore"})


def _accept(is_metadata_only: bool, suffix: str) -> str:
    return _METADATA_ONLY.format(suffix) if is_metadata_only else "application/json"
