"""Which gateway process holds an incarnation at this worker: never two at once.

Rows and commands are told apart by 24 bits of a gateway's choosing. Two gateways that chose the
same would be given each other's tokens, so the second is not taken in, whoever it is: what tells
processes apart is their instance, 128 random bits.
"""

from __future__ import annotations

from typing import NamedTuple


class _Holder(NamedTuple):
    endpoint: str
    instance: str


class Claims:
    """See the module. Shared by all ends of one worker, on the link's thread."""

    def __init__(self) -> None:
        self._holders: dict[int, _Holder] = {}

    def claim(self, incarnation: int, instance: str, endpoint: str) -> bool:
        """Enter who holds an incarnation; False when another does.

        `instance` is "" for a gateway that does not tell it: then its address has to do.
        """
        claimed = _Holder(endpoint, instance)
        return self._holders.setdefault(incarnation, claimed) == claimed

    def release(self, incarnation: int, endpoint: str) -> None:
        """Give up what an address held; the claim of another address stays."""
        holder = self._holders.get(incarnation)
        if holder is not None and holder.endpoint == endpoint:
            del self._holders[incarnation]
