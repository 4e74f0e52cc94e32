"""What all that serves a gateway's requests works with: one of each, made by the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.serving.live_requests import LiveRequests
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.link.api import GatewayLink


class ServingParts(NamedTuple):
    """The link, the workers on it, the requests that are alive; `clock` counts seconds, `listened`
    those in which this process listened: what others are late by.
    """

    link: GatewayLink
    workers: LinkedWorkers
    requests: LiveRequests
    metrics: GatewayMetrics
    clock: Callable[[], float]
    listened: Callable[[], float]
