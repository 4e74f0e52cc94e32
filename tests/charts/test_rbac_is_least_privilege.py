"""The operator's rights: no wildcard, one namespace when told, no Secret lists unless asked."""

from __future__ import annotations


def all_rules(objects):
    roles = [b for b in objects if b["kind"] in ("Role", "ClusterRole")]
    return [rule for role in roles for rule in role["rules"]]


def operator_rules(objects, one, kind):
    return one(objects, kind, "baton-operator")["rules"]


def verbs_on(rules, resource):
    return {verb for rule in rules if resource in rule["resources"] for verb in rule["verbs"]}


def test_no_rule_has_a_wildcard(render):
    values = "rbac: {watchSecrets: true}\nuninstall: {deleteResources: true}"
    for rule in all_rules(render(values)):
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]


def test_secrets_are_listed_only_when_their_watch_is_on(render, one):
    on = operator_rules(render("rbac: {watchSecrets: true}"), one, "ClusterRole")
    off = operator_rules(render("rbac: {watchSecrets: false}"), one, "ClusterRole")
    assert {"list", "watch"} <= verbs_on(on, "secrets")
    assert verbs_on(off, "secrets") == {"get", "create", "patch", "delete"}


def test_the_watch_of_secrets_follows_the_right_to_it(render, one):
    for value in ("true", "false"):
        deployment = one(render(f"rbac: {{watchSecrets: {value}}}"), "Deployment")
        env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        assert {"name": "BATON_WATCH_SECRETS", "value": value} in env


def test_it_can_never_escalate(render):
    for rule in all_rules(render("uninstall: {deleteResources: true}")):
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
        assert not {"roles", "clusterroles", "pods/exec", "nodes"} & set(rule["resources"])


def test_pods_are_only_watched_and_marked(render, one):
    assert verbs_on(operator_rules(render(), one, "ClusterRole"), "pods") == {
        "list", "watch", "patch",
    }  # fmt: skip


def test_what_users_own_is_only_read(render, one):
    rules = operator_rules(render(), one, "ClusterRole")
    assert verbs_on(rules, "pddeployments") == {"get", "list", "watch"}


def test_a_watched_namespace_needs_no_cluster_role(render, one):
    objects = render("watchNamespace: serving\nrbac: {aggregate: false}")
    kinds = {body["kind"] for body in objects}
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds
    role = one(objects, "Role", "baton-operator")
    assert role["metadata"]["namespace"] == "serving"
    assert one(objects, "RoleBinding", "baton-operator")["subjects"][0]["namespace"] == "system"
    env = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "BATON_WATCH_NAMESPACE", "value": "serving"} in env


def test_both_scopes_grant_the_same(render, one):
    namespaced = operator_rules(render("watchNamespace: serving"), one, "Role")
    assert namespaced == operator_rules(render(), one, "ClusterRole")


def test_the_lease_is_granted_by_name(render, one):
    rules = one(render(), "Role", "-lease")["rules"]
    by_verb = {verb: rule.get("resourceNames") for rule in rules for verb in rule["verbs"]}
    assert by_verb == {
        "create": None, "get": ["baton-operator"], "patch": ["baton-operator"],
    }  # fmt: skip


def test_nothing_is_granted_when_rbac_is_off(render):
    kinds = [b["kind"] for b in render("rbac: {create: false}\nwatchNamespace: serving")
             if "helm.sh/hook" not in b["metadata"].get("annotations", {})]  # fmt: skip
    assert not [kind for kind in kinds if "Role" in kind]


def test_people_get_their_rights_by_aggregation(render, one):
    view = one(render(), "ClusterRole", "-view")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    edit = one(render(), "ClusterRole", "-edit")
    assert "pdrolescalers/scale" in edit["rules"][0]["resources"]
    off = render("rbac: {aggregate: false}")
    assert [b["metadata"]["name"] for b in off if b["kind"] == "ClusterRole"] == ["baton-operator"]
