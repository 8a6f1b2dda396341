"""How ranks of one host tell each other what to read: each on a board, which is words that all of them see.

Who has something for its peers writes its address there, and they look when they wait for it. Who has read
it writes that on its own board. So nothing is sent: a message over gloo costs both ranks a system call and
a thread's wake-up, which takes time from a computation on the same core.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zero_core.comm.peer_memory import PeerMemory, Source

_ENTRY = 3
"""Words of an offer: its number, the address, and both combined, since who looks may see half of it."""


def words(slots: int) -> int:
    """That a board needs."""
    return (_ENTRY + 1) * slots


@dataclass(frozen=True)
class _Kept:
    number: int
    offered: Tensor
    """Alive as long as a peer may read it."""
    release: Callable[[], None]


class Board:
    """The offers of a group's ranks to each other: the n-th of each belong together."""

    def __init__(self, memory: PeerMemory, peers: list[int], start: int, slots: int) -> None:
        """``peers`` are those that can be read. The board's words begin at ``start`` of what is shared.

        ``slots`` is how many offers can be under way; one more waits until the oldest was read.
        """
        self.peers = peers
        self._memory = memory
        self._start = start
        self._slots = slots
        self._made = 0
        self._kept: deque[_Kept] = deque()

    def exchange(
        self,
        offered: Tensor,
        use: Callable[[list[Source]], None],
        *,
        offset: int = 0,
        release: Callable[[], None] | None = None,
        awaited: bool = False,
    ) -> Callable[[], None]:
        """Make the next offer. What is returned awaits those of the peers, and calls ``use`` with them.

        They are used from ``offset`` bytes on. ``release`` is called once all peers have read this offer and
        this rank theirs, in a later call or in ``release_all``; if ``awaited``, what is returned waits until
        the peers have.
        """
        self._made += 1
        number = self._made
        if number > self._slots:
            self._await_readers(number - self._slots)
        if release is not None:
            self._kept.append(_Kept(number, offered, release))
        address = offered.data_ptr()
        self._memory.share(self._entry(number), array("q", [number, address, number ^ address]))

        def finish(offered: Tensor) -> None:
            sources = [Source(rank, self._find(rank, number) + offset) for rank in self.peers]
            # Before what is read needs memory.
            self.release_read()
            use(sources)
            self._memory.share(self._mark(number), array("q", [number]))
            if awaited:
                self._await_readers(number)

        # Alive as long as nobody could have read it.
        return partial(finish, offered)

    def _await_readers(self, number: int) -> None:
        """Return when every peer has read this rank's offer of that number."""
        for rank in self.peers:
            self._memory.wait(rank, partial(self._has_read, rank, number))

    def release_read(self) -> None:
        """Release what everyone is done with by now, the oldest first."""
        while self._kept and self._is_done(self._kept[0].number):
            self._kept.popleft().release()

    def _is_done(self, number: int) -> bool:
        """This rank too: its own part of an offer is summed with what it reads."""
        mine = self._memory.shared(self._mark(number)) >= number
        return mine and all(self._has_read(rank, number) for rank in self.peers)

    def release_all(self) -> None:
        """Await that all was read, and release it."""
        while self._kept:
            self._await_readers(self._kept[0].number)
            self._kept.popleft().release()

    def _find(self, rank: int, number: int) -> int:
        """The address of a peer's offer."""
        self._memory.wait(rank, partial(self._has_offered, rank, number))
        return self._memory.look(rank, self._entry(number), _ENTRY)[1]

    def _has_offered(self, rank: int, number: int) -> bool:
        said, address, both = self._memory.look(rank, self._entry(number), _ENTRY)
        return said == number and said ^ address == both

    def _has_read(self, rank: int, number: int) -> bool:
        """A later number in its place says so too."""
        return self._memory.look(rank, self._mark(number), 1)[0] >= number

    # Where the words are.

    def _entry(self, number: int) -> int:
        return self._start + _ENTRY * (number % self._slots)

    def _mark(self, number: int) -> int:
        return self._start + _ENTRY * self._slots + number % self._slots
