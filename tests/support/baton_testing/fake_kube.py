"""An API server in memory that enforces the real one's rules, and a reconciler on it.

Enforced: uid and resourceVersion preconditions, generation on spec changes, field ownership of
server-side apply (a manager's dropped fields go, others' stay), the status subresource, one
controller per object, garbage collection by owner, selectors, watch histories that expire,
namespaces that end.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter

import msgspec

from baton_operator.children.apply import Applier
from baton_operator.children.desired import Apis
from baton_operator.children.resources.credentials import KeyPair
from baton_operator.children.revision_records import RevisionRecords
from baton_operator.cluster import api
from baton_operator.cluster.api import (
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    ListPage,
    NamespaceEnds,
)
from baton_operator.cluster.parents import ParentStore
from baton_operator.cluster.reflector import Reflector
from baton_operator.cluster.store import ChildStore
from baton_operator.models import ObjectKey
from baton_operator.pods.telemetry import Telemetry
from baton_operator.reconciling.reconciler import Reconciler, Tools
from baton_operator.reconciling.upgrades import Upgrades
from baton_operator.status.report import Reporter

_LIST_KEYS = {"ownerReferences": "uid", "containers": "name", "env": "name", "volumes": "name"}
_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "managedFields")
_KINDS = (*api.CHILD_KINDS, api.POD)


def copied(value):
    """Return a copy of what JSON can say; a fifth of what `deepcopy` takes."""
    return msgspec.json.decode(msgspec.json.encode(value))


def leaves(value, path=()):
    """Yield (path, value) of every field that a manager can own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value and path and _is_keyed(path[-1], value):
        for item in value:
            yield from leaves(item, (*path, f"={item[_LIST_KEYS[path[-1]]]}"))
    else:
        yield path, value


def _is_keyed(field, items):
    key = _LIST_KEYS.get(field)
    return key is not None and all(isinstance(item, dict) and key in item for item in items)


def owned_fields(manifest):
    """Return the fields that applying a manifest claims."""
    body = {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind", "status")}
    metadata = {k: v for k, v in body.pop("metadata").items() if k not in _IDENTITY}
    return dict(leaves(body | ({"metadata": metadata} if metadata else {})))


def put(body, path, value):
    """Set a field, making what leads to it."""
    for here, after in itertools.pairwise(path):
        if here.startswith("="):
            body = _item(body, here, path)
        elif not here.startswith("="):
            empty = [] if after.startswith("=") else {}
            body = body.setdefault(here, empty)
    last = path[-1]
    if last.startswith("="):
        _item(body, last, path)
    else:
        body[last] = copied(value)


def _item(items, mark, path):
    key = _LIST_KEYS[path[path.index(mark) - 1]]
    found = next((i for i in items if i.get(key) == mark[1:]), None)
    if found is None:
        found = {key: mark[1:]}
        items.append(found)
    return found


def remove(body, path):
    """Take a field away, and what it leaves empty."""
    here, *rest = path
    if here.startswith("="):
        key = next((i for i, item in enumerate(body) if here[1:] in _marks(item)), None)
    else:
        key = here if here in body else None
    if key is None:
        return
    if rest:
        remove(body[key], rest)
    if not rest or not body[key]:
        del body[key]


def _marks(item):
    return (item.get("name"), item.get("uid"))


class FakeKube:
    """See the module; implements `api.KubeApi`."""

    def __init__(self):
        self.objects = {}
        self.owners = {}
        self.history = []
        self.oldest = 0
        self.version = 100
        self.uids = itertools.count(1)
        self.clock = itertools.count(1)
        self.writes = Counter()
        self.reads = Counter()
        self.faults = {}
        self.apis = set()
        self.ending = set()
        self.refused = 0

    def fault(self, verb, kind, error, name=""):
        """Make the next such call fail."""
        self.faults[verb, kind.kind, name] = error

    def _fail(self, verb, kind, name=""):
        for key in ((verb, kind.kind, name), (verb, kind.kind, "")):
            if key in self.faults:
                raise self.faults.pop(key)

    def find(self, kind, name, namespace="ns"):
        """Return the live object itself, or None."""
        return self.objects.get((kind.kind, namespace, name))

    def names(self, kind):
        """Return the names of every object of a kind."""
        return sorted(name for k, _, name in self.objects if k == kind.kind)

    async def get(self, kind, namespace, name, *, is_metadata_only=False):
        self.reads[kind.kind] += 1
        self._fail("get", kind, name)
        body = self.find(kind, name, namespace)
        if body is None:
            return None
        return copied(_shown(body, is_metadata_only))

    async def apply(self, kind, manifest, manager, *, uid):
        metadata = manifest["metadata"]
        self._fail("apply", kind, metadata["name"])
        place = (kind.kind, metadata["namespace"], metadata["name"])
        fields = owned_fields(manifest)
        before = self.objects.get(place)
        if before is None or uid != before["metadata"]["uid"]:
            raise Conflict(409, "Conflict", f"{metadata['name']} is not the object meant")
        body = copied(before)
        owners = self.owners[place]
        dropped = owners.get((manager, "Apply"), set()) - fields.keys()
        for path in sorted(dropped, key=lambda path: path[-1] in _LIST_KEYS.values()):
            if not any(path in held for who, held in owners.items() if who != (manager, "Apply")):
                remove(body, path)
        was = owned_fields(before)
        for who, held in owners.items():
            if who != (manager, "Apply"):
                taken = {p for p in held & fields.keys() if was.get(p) != fields[p]}
                owners[who] = held - taken
        for path, value in fields.items():
            put(body, path, value)
        self._check_controllers(body)
        owners[manager, "Apply"] = set(fields)
        return msgspec.json.encode(self._store(place, kind, before, body, "apply"))

    async def create(self, kind, manifest, manager):
        metadata = manifest["metadata"]
        self._fail("create", kind, metadata["name"])
        if metadata["namespace"] in self.ending:
            self.refused += 1
            raise NamespaceEnds(403, "Forbidden", "it is being terminated")
        place = (kind.kind, metadata["namespace"], metadata["name"])
        if place in self.objects:
            raise AlreadyExists(409, "AlreadyExists", metadata["name"])
        body = copied({k: v for k, v in manifest.items() if k != "status"})
        self._check_controllers(body)
        self.owners[place] = {(manager, "Update"): set(owned_fields(manifest))}
        return msgspec.json.encode(self._store(place, kind, None, body, "create"))

    async def hand_over(self, kind, created, manager):
        self._fail("hand over", kind, created.name)
        place = (kind.kind, created.namespace, created.name)
        before = self.objects.get(place)
        entries = before["metadata"]["managedFields"] if before else []
        entry = entries[created.entry] if created.entry < len(entries) else {}
        is_meant = before is not None and created.uid == before["metadata"]["uid"]
        if not is_meant or (entry.get("manager"), entry.get("operation")) != (manager, "Update"):
            raise Conflict(422, "Invalid", f"{created.name}: testing value failed")
        owners = self.owners[place]
        owners[manager, "Apply"] = owners.pop((manager, "Update"))
        self._store(place, kind, before, copied(before), "hand over")

    async def merge(self, kind, namespace, name, patch, subresource=""):
        self._fail("patch", kind, name)
        return self.edit(kind, name, patch, "baton-operator", subresource, namespace)

    def edit(self, kind, name, patch, manager, subresource="", namespace="ns"):
        """Merge-patch as some manager; what a user or a controller does."""
        place = (kind.kind, namespace, name)
        before = self.objects.get(place)
        if before is None:
            raise ApiError(404, "NotFound", name)
        for field in ("uid", "resourceVersion"):
            wanted = patch.get("metadata", {}).get(field)
            if wanted is not None and wanted != before["metadata"][field]:
                raise Conflict(409, "Conflict", f"{field} is {before['metadata'][field]}")
        body = copied(before)
        parts = (
            ("status",) if subresource == "status" else ("metadata", "spec", "data", "stringData")
        )
        for part in parts:
            if part in patch:
                body[part] = _merged(body.get(part), patch[part])
        for field in ("uid", "resourceVersion"):
            body["metadata"][field] = before["metadata"][field]
        if not subresource:
            changed = {k: v for k, v in patch.items() if k in parts}
            changed.setdefault("metadata", {})
            held = self.owners[place].setdefault((manager, "Update"), set())
            # Who takes a field away manages nothing by that, as on a server: no time tells of it.
            held |= {path for path, value in owned_fields(changed).items() if value is not None}
            if not held:
                del self.owners[place][manager, "Update"]
        return copied(self._store(place, kind, before, body, "status" if subresource else "patch"))

    async def delete(self, kind, namespace, name, uid):
        self._fail("delete", kind, name)
        body = self.find(kind, name, namespace)
        if body is not None and body["metadata"]["uid"] == uid:
            self.remove(kind, name, namespace)
            self.writes["delete", kind.kind] += 1

    def remove(self, kind, name, namespace="ns"):
        """Delete, as anybody would; owned objects stay until `collect_garbage`."""
        place = (kind.kind, namespace, name)
        body = self.objects.pop(place)
        self.owners.pop(place, None)
        self._record("DELETED", kind.kind, body)

    def collect_garbage(self):
        """Delete every object whose controller no longer exists; return their names."""
        gone = []
        while True:
            uids = {body["metadata"]["uid"] for body in self.objects.values()}
            orphans = [
                place
                for place, body in self.objects.items()
                for ref in body["metadata"].get("ownerReferences", [])
                if ref["uid"] not in uids
            ]
            if not orphans:
                return gone
            for kind, namespace, name in orphans:
                body = self.objects.pop((kind, namespace, name))
                self._record("DELETED", kind, body)
                gone.append((kind, name))

    async def has_api(self, kind):
        return kind.kind in self.apis

    async def list_page(self, kind, namespace, selector, *, is_metadata_only, token):
        self.reads["list", kind.kind] += 1
        self._fail("list", kind)
        matching = [
            body
            for (k, ns, _), body in self.objects.items()
            if k == kind.kind and namespace in ("", ns) and _selects(selector, body)
        ]
        start = int(token or 0)
        page = matching[start : start + 5]
        items = [msgspec.json.encode(_shown(b, is_metadata_only)) for b in page]
        after = str(start + 5) if start + 5 < len(matching) else ""
        return ListPage(items, str(self.version), after)

    async def watch(self, kind, namespace, selector, resource_version, *, is_metadata_only):
        self._fail("watch", kind)
        if int(resource_version) < self.oldest:
            raise Expired(410, "Expired", "too old")
        news = bisect.bisect_right(self.history, int(resource_version), key=lambda event: event[0])
        for _, type_, kind_name, body in self.history[news:]:
            is_here = namespace in ("", body["metadata"]["namespace"])
            if kind_name == kind.kind and is_here and _selects(selector, body):
                shown = _shown(body, is_metadata_only)
                yield msgspec.json.encode({"type": type_, "object": shown})
        mark = {"metadata": {"resourceVersion": str(self.version)}}
        yield msgspec.json.encode({"type": "BOOKMARK", "object": mark})

    def forget_history(self):
        """Expire every watch position before now."""
        self.history.clear()
        self.oldest = self.version + 1
        self.version += 1

    def _store(self, place, kind, before, body, verb):
        if before is not None and verb != "hand over" and _content(before) == _content(body):
            return before
        self.writes[verb, kind.kind] += 1
        self.version += 1
        metadata = body["metadata"]
        metadata["resourceVersion"] = str(self.version)
        if before is None:
            metadata["uid"] = f"uid-{next(self.uids)}"
            metadata["generation"] = 1
        elif before.get("spec") != body.get("spec"):
            metadata["generation"] = before["metadata"]["generation"] + 1
        self._note_managers(place, metadata)
        self.objects[place] = body
        self._record("MODIFIED" if before else "ADDED", kind.kind, body)
        return body

    def _note_managers(self, place, metadata):
        before = self.objects.get(place, {}).get("metadata", {}).get("managedFields", [])
        times = {(m["manager"], m["operation"]): m for m in before}
        fields = []
        for who, held in self.owners.get(place, {}).items():
            old = times.get(who)
            size = len(held)
            is_same = old is not None and old["size"] == size
            time = old["time"] if is_same else f"2026-01-01T00:00:{next(self.clock):06d}Z"
            entry = {"manager": who[0], "operation": who[1], "time": time, "size": size}
            fields += [entry] if held else []
        metadata["managedFields"] = fields

    def _check_controllers(self, body):
        refs = body["metadata"].get("ownerReferences", [])
        if sum(bool(ref.get("controller")) for ref in refs) > 1:
            raise ApiError(422, "Invalid", "only one owner reference can be the controller")

    def _record(self, type_, kind, body):
        if type_ == "DELETED":
            self.version += 1
            body = copied(body)
            body["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, type_, kind, copied(body)))


def _shown(body, is_metadata_only):
    return {"metadata": body["metadata"]} if is_metadata_only else body


def _content(body):
    metadata = {k: v for k, v in body["metadata"].items() if k not in ("resourceVersion",)}
    return {**body, "metadata": metadata}


def _merged(old, patch):
    if not isinstance(patch, dict):
        return copied(patch)
    result = dict(old or {})
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _selects(selector, body):
    labels = body["metadata"].get("labels", {})
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return all(labels.get(key) == value for key, value in wanted.items())


class FakeProbe:
    """Requests in flight by pod address, or by address and health port."""

    def __init__(self):
        self.busy = {}
        self.texts = {}
        self.ways = {}

    async def remaining(self, ip, port):
        return self.busy.get((ip, port), self.busy.get(ip))

    async def metrics(self, ip, port):
        return self.texts.get(ip)

    async def readiness(self, ip, port):
        return self.ways.get((ip, port))


class Cluster:
    """A FakeKube with an operator on it, driven step by step.

    `now` is what the operator's clock says; `clock` gives the seconds that nobody sets, by default
    those of `now`. The status is written at most once in `status_seconds`.
    """

    def __init__(self, apis=None, upgrade_models=2, status_seconds=0.001, clock=None):
        self.kube = FakeKube()
        self.upgrade_models = upgrade_models
        self.status_seconds = status_seconds
        self.clock = clock or (lambda: self.now)
        self.now = 1_000_000.0
        self.apis = apis or Apis()
        self.changes = []
        self.broken = set()
        self.start()

    def start(self):
        """Start an operator with an empty memory, as after a crash."""
        self.parents, self.children = ParentStore(), ChildStore(self.clock)
        self.probe = FakeProbe()
        self.reporter = Reporter(
            self.kube, self.parents, lambda: self.now, self.status_seconds, self.clock
        )
        self.applied = Counter()
        self.woken = []
        applier = Applier(self.kube, self.children, 8, self._count)
        numbers = itertools.count()
        self.tools = Tools(
            kube=self.kube,
            parents=self.parents,
            children=self.children,
            applier=applier,
            records=RevisionRecords(self.kube, self.children),
            reporter=self.reporter,
            probe=self.probe,
            telemetry=Telemetry(self.probe, lambda: self.now, self.woken.append),
            upgrades=Upgrades(self.parents, self.upgrade_models, self.woken.append),
            make_pair=lambda: KeyPair(f"public-{next(numbers)}", f"secret-{next(numbers)}"),
            now=lambda: self.now,
            clock=self.clock,
        )
        self.reconciler = Reconciler(self.tools, self.apis)
        self.reflectors = [
            Reflector(
                self.kube,
                kind,
                self.children,
                lambda owner, change: self.changes.append((owner, change)),
                is_metadata_only=kind.kind not in ("Deployment", "Pod", "PDRoleScaler"),
            )
            for kind in _KINDS
        ]
        self.versions = {}

    def _count(self, kind, outcome):
        self.applied[kind, str(outcome)] += 1

    async def create(self, name="chat", **spec):
        """Create a PDDeployment and deliver its event."""
        full = {
            "image": "worker:1",
            "model": {"servedName": name, "path": "/models/m"},
            "roles": [{"name": "prefill"}, {"name": "decode"}],
        } | spec
        manifest = {
            "apiVersion": "baton.dev/v1alpha1",
            "kind": "PDDeployment",
            "metadata": {"name": name, "namespace": "ns"},
            "spec": full,
        }
        body = msgspec.json.decode(await self.kube.create(api.PD_DEPLOYMENT, manifest, "kubectl"))
        self.parents.seen(body, is_event=True)
        return ObjectKey("ns", name)

    def change(self, name="chat", **spec):
        """Edit the spec and deliver the event."""
        body = self.kube.edit(api.PD_DEPLOYMENT, name, {"spec": spec}, "kubectl")
        self.parents.seen(body, is_event=True)

    async def pump(self):
        """Deliver what the watches have."""
        for reflector in self.reflectors:
            version = self.versions.get(reflector.kind.kind, "")
            try:
                if not version:
                    version = await reflector.list_all()
                version = await reflector.watch_once(version)
            except Expired:
                version = await reflector.list_all()
            self.versions[reflector.kind.kind] = version

    async def reconcile(self, name="chat"):
        """Deliver events, then run one pass."""
        await self.pump()
        self.now += 1
        return await self.reconciler.reconcile(ObjectKey("ns", name))

    def follow(self, ready=True, frozen=()):
        """Let the workload controllers follow their desired counts, but of those in `frozen`."""
        for name in self.kube.names(api.DEPLOYMENT):
            if name in frozen:
                continue
            body = self.kube.find(api.DEPLOYMENT, name)
            revision = body["metadata"]["labels"].get("baton.dev/revision", "")
            count = body["spec"]["replicas"]
            is_ready = ready and revision not in self.broken
            status = {
                "observedGeneration": body["metadata"]["generation"],
                "replicas": count,
                "updatedReplicas": count,
                "availableReplicas": count if is_ready else 0,
            }
            self.kube.edit(api.DEPLOYMENT, name, {"status": status}, "cm", "status")

    async def settle(self, name="chat", limit=60):
        """Reconcile with healthy pods until nothing is written any more."""
        for _ in range(limit):
            before = self.kube.version
            await self.reconcile(name)
            self.follow()
            if self.kube.version == before:
                return
        raise AssertionError("no rest")

    def status(self, name="chat"):
        """Return the PDDeployment's status."""
        return self.kube.find(api.PD_DEPLOYMENT, name).get("status", {})

    def condition(self, type_, name="chat"):
        """Return one condition as (status, reason)."""
        found = {c["type"]: (c["status"], c["reason"]) for c in self.status(name)["conditions"]}
        return found[type_]

    def replicas(self):
        """Return the desired replicas of every worker Deployment, by revision and role."""
        found = {}
        for name in self.kube.names(api.DEPLOYMENT):
            body = self.kube.find(api.DEPLOYMENT, name)
            labels = body["metadata"]["labels"]
            if labels["baton.dev/role"] != "gateway":
                place = (labels["baton.dev/revision"], labels["baton.dev/role"])
                found[place] = body["spec"]["replicas"]
        return found
