"""What `helm install` prints of an uninstall is what an uninstall of these values does."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_cluster.installation import helm
from baton_cluster.programs import programs

CHART = Path(__file__).resolve().parents[2] / "charts" / "baton"
UPGRADE = ("upgrade", "baton", str(CHART), "-n", "baton-system", "--dry-run=client")
SAID = {
    "kept": ((), "Uninstalling keeps the CustomResourceDefinitions and every served model"),
    "removed": (("crds.keep=false",), "and with them EVERY PDDeployment and its pods"),
    "removed where nobody else needs them": (
        ("crds.keep=false", "watchNamespace=models"),
        "EVERY PDDeployment of namespace models and its pods",
    ),
    "another's": (("crds.enabled=false",), "Uninstalling leaves them and every served model alone"),
    "another's, not kept": (
        ("crds.enabled=false", "crds.keep=false"),
        "Uninstalling leaves them and every served model alone",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_it_names_what_becomes_of_the_definitions(kubectl, case):
    values, said = SAID[case]
    words = [word for value in values for word in ("--set", value)]
    program = programs(("helm",))["helm"]
    text = helm(program, kubectl, *UPGRADE, *words)
    notes = text.partition("NOTES:")[2]
    assert said in notes
    assert notes.count("Uninstalling") == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("crds.keep=false", "the longest of drain.graceSeconds and gateway.drainSeconds"),
        ("uninstall.deleteResources=true,uninstall.timeoutSeconds=9", "ends the wait after 9 s"),
        ("uninstall.timeoutSeconds=9", ""),
    ],
)
def test_it_names_how_long_an_uninstall_that_deletes_models_takes(kubectl, values, said):
    text = helm(programs(("helm",))["helm"], kubectl, *UPGRADE, "--set", values)
    notes = text.partition("NOTES:")[2]
    assert ("--timeout" in notes) == bool(said)
    assert said in notes
