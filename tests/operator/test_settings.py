"""Settings come from the environment; a bad one names its variable."""

from __future__ import annotations

import pytest

from baton_operator.settings import SettingError, read_settings


def test_the_environment_is_read_by_name_and_type():
    settings = read_settings(
        {"BATON_WORKERS": "3", "BATON_LEADER_ELECT": "false", "BATON_RESYNC_SECONDS": "60"}
    )
    assert (settings.workers, settings.leader_elect, settings.resync_seconds) == (3, False, 60.0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BATON_WORKERS", "many"),
        ("BATON_WORKERS", "0"),
        ("BATON_LEADER_ELECT", "perhaps"),
        ("BATON_LEASE_RENEW_SECONDS", "30"),
        ("BATON_LOG_FORMAT", "xml"),
        ("BATON_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_names_its_variable(variable, value):
    with pytest.raises(SettingError, match=variable):
        read_settings({variable: value})
