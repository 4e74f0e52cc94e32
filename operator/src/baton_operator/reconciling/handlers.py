"""kopf's side: decorators and settings, and nothing else. Every handler enqueues a key.

kopf is the informer of PDDeployments and the shell of the process: credentials, signals, watch
streams that end the operator when they die.
"""

from __future__ import annotations

import os
from typing import Any

import kopf

from baton_operator.cluster.kopf_session import bounded_login
from baton_operator.cluster.parents import ParentStore
from baton_operator.models import ObjectKey
from baton_operator.names import GROUP, VERSION
from baton_operator.reconciling.work_queue import WorkQueue


class _NoEssence(kopf.DiffBaseStorage):
    """kopf compares no versions of an object for us: without change handlers that is for nothing.

    By default each event is copied several times for it before any handler hears of it.
    """

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("no handler of ours has a state that kopf keeps")


class _NoProgress(kopf.ProgressStorage):
    """Handlers of events have no progress to keep."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("no handler of ours has a state that kopf keeps")

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def build_registry(parents: ParentStore, queue: WorkQueue[ObjectKey]) -> kopf.OperatorRegistry:
    """Return the handlers of one operator."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        info = None
        if "KUBECONFIG" not in os.environ:
            info = kopf.login_with_service_account(**kwargs)
        info = info or kopf.login_with_kubeconfig(**kwargs)
        return None if info is None else bounded_login(info)

    @kopf.on.event(GROUP, VERSION, "pddeployments", registry=registry)
    async def on_deployment(event: Any, **_: Any) -> None:
        body = event["object"]
        if event["type"] == "DELETED":
            key = ObjectKey(body["metadata"]["namespace"], body["metadata"]["name"])
            parents.gone(key, body["metadata"]["uid"])
            queue.add(key)
        elif parents.seen(body, is_event=True):
            queue.add(ObjectKey(body["metadata"]["namespace"], body["metadata"]["name"]))

    return registry


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings; the reasons stand beside each."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True  # the Lease elects; peering freezes equals
    settings.scanning.disabled = True  # else list and watch of CRDs and namespaces
    settings.posting.enabled = False  # our Events are posted by `events`
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.persistence.diffbase_storage = _NoEssence()
    settings.persistence.progress_storage = _NoProgress()
    settings.queueing.idle_timeout = 1.0  # an idle object's task and queue are memory
    settings.queueing.exit_timeout = 1.0
    settings.execution.max_workers = 4
    settings.process.ultimate_exiting_timeout = 20
    return settings
