"""Pods that hold CURVE keys, on a `Cluster`: who is ready is who can link.

Enforces what pods and processes do. A pod reads its own pair and the gateways' key once, when it
begins; the list of allowed keys it reads again whenever the Secret changes, and who is not in it is
cut off. A worker is ready while a gateway is linked, a gateway while it has a worker of each role.
A changed template replaces pods one by one: a new one beside the old (surge 1), and an old one
leaves when a new one is ready.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_operator.cluster import api


@dataclass(eq=False)
class Pod:
    """A running pod and the keys that it read."""

    role: str
    revision: str
    template: str
    own: str
    gateway_key: str
    is_ready: bool = False


class KeyedPods:
    """The pods of a cluster's Deployments."""

    def __init__(self, cluster, name="chat"):
        self.cluster = cluster
        self.name = name
        self.pods: dict[str, list[Pod]] = {}

    def secret(self):
        """Return the Secret's texts."""
        return self.cluster.kube.find(api.SECRET, f"{self.name}-curve")["stringData"]

    def edit(self, **texts):
        """Edit the Secret, as `kubectl edit` does."""
        changes = {"stringData": {key.replace("_", "."): text for key, text in texts.items()}}
        self.cluster.kube.edit(api.SECRET, f"{self.name}-curve", changes, "kubectl")

    def of(self, role):
        return [pod for pods in self.pods.values() for pod in pods if pod.role == role]

    def follow(self):
        """Let Deployments follow their specs once, and processes link."""
        names = self.cluster.kube.names(api.DEPLOYMENT)
        self.pods = {name: self.pods.get(name, []) for name in names}
        for name in names:
            self._scale(name, self.cluster.kube.find(api.DEPLOYMENT, name))
        self._link()
        for name in names:
            self._tell(name, self.cluster.kube.find(api.DEPLOYMENT, name))

    async def look(self, times=1, seconds=0):
        """Run passes, pods following each."""
        for _ in range(times):
            self.cluster.now += seconds
            await self.cluster.reconcile(self.name)
            self.follow()

    def _scale(self, name, body):
        count, template = body["spec"]["replicas"], repr(body["spec"]["template"])
        pods = self.pods[name]
        old = [pod for pod in pods if pod.template != template]
        new = [pod for pod in pods if pod.template == template]
        if old and len(new) <= count:
            old = old[: max(0, count - sum(pod.is_ready for pod in new))]
        most = count + 1 if old else count
        new = sorted(new, key=lambda pod: not pod.is_ready)[:count]
        wanted = min(count, most - len(old))
        new += [self._begin(body, template) for _ in range(wanted - len(new))]
        self.pods[name] = old[:count] + new

    def _begin(self, body, template):
        labels, secret = body["metadata"]["labels"], self.secret()
        role = labels["baton.dev/role"]
        own = secret[f"{role}.public"].strip()
        revision = labels.get("baton.dev/revision", "")
        return Pod(role, revision, template, own, secret["gateway.public"].strip())

    def _link(self):
        allowed = {line.split()[0] for line in self.secret()["workers.allowed"].splitlines()}
        workers = [pod for role in ("prefill", "decode") for pod in self.of(role)]
        for gateway in self.of("gateway"):
            gateway.is_ready = {"prefill", "decode"} <= {
                w.role for w in workers if w.own in allowed and w.gateway_key == gateway.own
            }
        served = {gateway.own for gateway in self.of("gateway")}
        for worker in workers:
            worker.is_ready = worker.own in allowed and worker.gateway_key in served

    def _tell(self, name, body):
        template, pods = repr(body["spec"]["template"]), self.pods[name]
        status = {
            "observedGeneration": body["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": sum(pod.template == template for pod in pods),
            "availableReplicas": sum(pod.is_ready for pod in pods),
        }
        self.cluster.kube.edit(api.DEPLOYMENT, name, {"status": status}, "cm", "status")
