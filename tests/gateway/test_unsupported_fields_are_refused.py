"""A field whose value would change the answer is refused by name, never ignored (R34, R41)."""

from __future__ import annotations

import pytest

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.request import Endpoint
from baton_worker.gateway.unsupported import refuse_unsupported

ASKING = {
    "suffix": "x",
    "guided_json": {"type": "object"},
    "response_format": {"type": "json_object"},
}


@pytest.mark.parametrize("name", ASKING)
def test_what_logprobs_and_sampling_lack_is_refused(name):
    with pytest.raises(ApiError) as refused:
        refuse_unsupported(Endpoint.CHAT, {"model": "tiny", name: ASKING[name]})
    assert refused.value.status == 400
    assert name in str(refused.value)
