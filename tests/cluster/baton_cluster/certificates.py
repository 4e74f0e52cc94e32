"""A certificate authority of one cluster, by openssl: no key outlives the cluster's folder."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its private key."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into one folder."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and the authority's own pair."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self.root = self._make("ca", "/CN=baton-test-ca", [])

    def issue(self, name: str, subject: str, alternative_names: Sequence[str] = ()) -> Pair:
        """Return a pair for `subject`; alternative names are `DNS:...` or `IP:...`."""
        words = ["-CA", str(self.root.certificate), "-CAkey", str(self.root.key)]
        words += ["-addext", "basicConstraints=critical,CA:FALSE"]
        if alternative_names:
            words += ["-addext", f"subjectAltName={','.join(alternative_names)}"]
        return self._make(name, subject, words)

    def signing_key(self, name: str) -> Path:
        """Return an RSA private key, for service account tokens."""
        path = self._folder / f"{name}.key"
        _openssl(
            "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", str(path)
        )
        return path

    def _make(self, name: str, subject: str, words: Sequence[str]) -> Pair:
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files = ["-keyout", str(pair.key), "-out", str(pair.certificate)]
        _openssl("req", "-x509", *_KEY, "-subj", subject, *files, *words)
        return pair


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
