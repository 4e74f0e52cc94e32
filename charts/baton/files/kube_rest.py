"""The Kubernetes API by the pod's own service account, with nothing but the standard library."""

import http.client
import json
import os
import pathlib
import ssl
import time
import urllib.error
import urllib.request

ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
PDDEPLOYMENTS = "/apis/baton.dev/v1alpha1"


class NoAnswer(RuntimeError):
    """The server was not reached, has no time, or failed: the same request may do later."""


class Api:
    """Sends requests; a 404 is None, every other refusal raises with the server's words."""

    def __init__(self):
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        host = f"[{host}]" if ":" in host else host
        self.server = f"https://{host}:{port}"
        self.context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))

    def send(self, method, path, body=None, content_type="application/json"):
        """Return the decoded answer, or None when there is no such object."""
        request = urllib.request.Request(
            self.server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
                "Content-Type": content_type,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            text = error.read().decode(errors="replace")
            kind = NoAnswer if error.code == 429 or error.code >= 500 else RuntimeError
            raise kind(f"{method} {path}: {error.code} {text}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(f"{method} {path}: {error!r}") from error


def wait(claim, look, seconds):
    """Return the first true result of `look`; raise TimeoutError with the claim.

    A server that does not answer for a while, as while it is replaced, has not said no.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            result = look()
        except NoAnswer as error:
            print(f"asking again: {error}", flush=True)
            result = None
        if result:
            print(f"ok: {claim}", flush=True)
            return result
        time.sleep(0.5)
    raise TimeoutError(f"not so after {seconds} s: {claim}")
