"""How the ranks agree to stop: at a boundary that all of them reach, for the same reason."""

import torch

from zero_core.comm.collectives import Communicator
from zero_core.training.run import Action, Outcome, StopRequest


class Stopped(Exception):
    """Every rank raises it at the same place."""

    def __init__(self, action: Action) -> None:
        super().__init__(action)
        self.action = action

    def outcome(self, step: int) -> Outcome:
        if self.action == "cancel":
            return Outcome("cancelled", "cancelled_by_user", step=step)
        return Outcome("paused", "paused_by_user", step=step)


class StopVote:
    def __init__(self, request: StopRequest, group: Communicator) -> None:
        self._request = request
        self._group = group

    def check(self) -> None:
        """Raise ``Stopped`` if any rank was asked to stop; a cancel outweighs a pause. Collective."""
        mine = self._request.action()
        votes = torch.tensor([float(mine == "pause"), float(mine == "cancel")])
        pause, cancel = self._group.agree(votes).tolist()
        if cancel:
            raise Stopped("cancel")
        if pause:
            raise Stopped("pause")
