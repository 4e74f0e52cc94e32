"""The playground's page: off by default, open without a key when on, and shut in by its policy."""

import base64
import hashlib
import re

import httpx

from baton_worker.gateway.server.playground import content_security_policy


def test_it_is_off_by_default(start_gateway):
    assert httpx.get(f"{start_gateway().url}/playground").status_code == 404


def test_the_page_needs_no_key_but_its_requests_do(start_gateway, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    gateway = start_gateway(playground=True, api_keys_file=str(keys))
    assert httpx.get(f"{gateway.url}/playground").status_code == 200
    assert httpx.get(f"{gateway.url}/v1/models").status_code == 401


def test_the_policy_names_exactly_the_pages_own_script_and_style(start_gateway):
    reply = httpx.get(f"{start_gateway(playground=True).url}/playground")
    policy = reply.headers["content-security-policy"]
    for tag in ("script", "style"):
        (body,) = re.findall(f"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_a_changed_script_changes_the_policy():
    pages = [b"<style>a</style><script>%b</script>" % body for body in (b"1", b"2")]
    assert len(set(map(content_security_policy, pages))) == 2
