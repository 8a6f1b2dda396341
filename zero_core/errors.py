"""What the engine refuses or gives up on, each with a stable code.

EngineError
├── PlanMismatch        plan_mismatch        ranks do not hold the same model
├── CheckpointDamaged   checkpoint_damaged   a file is missing, short or altered
├── CheckpointMismatch  checkpoint_mismatch  a good checkpoint, of another model
├── PeerFailed          peer_failed          another rank gave up first; its message has the cause
├── PeerGone            peer_gone            another rank has closed its engine, or has ended
├── PeerSilent          peer_silent          another rank did not go on for as long as was configured
├── ScratchFull         scratch_full         no space for what the disk tier keeps
├── ScratchFailed       scratch_failed       the disk refused to read or write it
└── ScratchDamaged      scratch_damaged      what was read back is not what was written
"""


class EngineError(RuntimeError):
    code = "engine_error"


class PlanMismatch(EngineError):
    code = "plan_mismatch"


class CheckpointDamaged(EngineError):
    code = "checkpoint_damaged"


class CheckpointMismatch(EngineError):
    code = "checkpoint_mismatch"


class PeerFailed(EngineError):
    code = "peer_failed"


class PeerGone(EngineError):
    code = "peer_gone"


class PeerSilent(EngineError):
    code = "peer_silent"


class ScratchFull(EngineError):
    code = "scratch_full"


class ScratchFailed(EngineError):
    code = "scratch_failed"


class ScratchDamaged(EngineError):
    code = "scratch_damaged"
